"""Fast counters and histograms for events that occur thousands of times a second, exported to Prometheus.

Those of ``prometheus_client`` take a lock per update, half a microsecond each and a dozen per session round:
a fifth of the router's own work with 64 sessions. These are plain numbers, written by one thread, the
router's loop, and read by any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Count:
    """A monotonically growing number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """Adds ``amount`` >= 0."""
        self.value += amount


class _Exported(Collector):
    """Base of metrics in a registry, with a name that no other metric there has."""

    label_names: tuple[str, ...] = ()
    """Label names of its samples, without a histogram's ``le``."""

    def describe(self) -> Iterable[Metric]:
        """The registry asks for the names."""
        return self.collect()


class Counter(Count, _Exported):
    """A counter without labels.

    Args:
        name: as exposed, without ``_total``.
        documentation: its help text.
        registry: registry that exports it.
    """

    __slots__ = ("_documentation", "_name")

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        super().__init__()
        self._name, self._documentation = name, documentation
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See prometheus_client's ``Collector``."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class LabelledCounter(_Exported):
    """Counters of one name with different labels.

    Args:
        name, documentation, registry: as ``Counter``.
        labels: label names.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], *, registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self.label_names = name, documentation, tuple(labels)
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        assert len(values) == len(self.label_names), values
        return self._counts.setdefault(values, Count())

    def remove(self, *values: str) -> None:
        """Forgets the counter with these labels, if there is one."""
        self._counts.pop(values, None)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self.label_names)
        for values, count in list(self._counts.items()):
            family.add_metric(values, count.value)
        yield family


class Histogram(_Exported):
    """Counts of values at or below each bound.

    Args:
        name, documentation, registry: as ``Counter``.
        buckets: upper bounds, ascending; an unbounded one is added.
    """

    def __init__(
        self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Records a value ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = (*(repr(bound) for bound in self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
