"""Metrics of adapters, by the names of those that are loaded: as many labels as there are places."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from specray.telemetry import counters as counts


class AdapterMetrics:
    """Part of a router's metrics.

    Args:
        now: returns seconds since 1970.
    """

    def __init__(self, registry: CollectorRegistry, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.loads = Counter(
            "specray_adapter_loads",
            "Loads of adapters, by what came of them: loaded, refused, no_room or lost.",
            ["result"],
            registry=registry,
        )
        self.loaded = Gauge("specray_adapters_loaded", "Adapters in the target's memory.", registry=registry)
        self._tokens = tuple(
            counts.LabelledCounter(f"specray_adapter_{name}_tokens", text, ["adapter"], registry=registry)
            for name, text in (
                ("output", "Tokens committed, of requests with an adapter that is loaded now."),
                ("draft", "Draft tokens verified for them."),
                ("accepted", "Those of these that are part of an output."),
            )
        )
        self._requests = Gauge(
            "specray_adapter_requests_info",
            "Names of adapters whose requests run and wait; the value is the time at which they changed.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=registry,
        )
        self._names: frozenset[str] = frozenset()
        self._shown: tuple[str, str, str] | None = None

    def keep(self, names: Collection[str]) -> None:
        """Only these have labels from now on."""
        gone, self._names = self._names - set(names), frozenset(names)
        for counter in self._tokens:
            for name in gone:
                counter.remove(name)

    def observe(self, name: str, num_tokens: int, num_draft: int, num_accepted: int) -> None:
        """Counts a round of a request with the adapter; of one without a label nothing."""
        if name in self._names:
            for counter, amount in zip(self._tokens, (num_tokens, num_draft, num_accepted), strict=True):
                counter.labels(name).inc(amount)

    def show_requests(self, most: int, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Says whose requests run and wait now; ``most``: adapters in memory."""
        labels = str(most), ",".join(sorted(running)), ",".join(sorted(waiting))
        if labels != self._shown:
            self._shown = labels
            self._requests.clear()
            self._requests.labels(*labels).set(self._now())
