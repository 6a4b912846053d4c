"""Samples of a service's metrics: parsed from Prometheus text, subtracted, and made into figures."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

OF_REPLICAS = ("application", "deployment", "replica")
"""Labels by which a service tells its replicas apart."""
Labels = tuple[tuple[str, str], ...]
Samples = Mapping[tuple[str, Labels], float]


def parse_samples(text: str, *, summed: Collection[str] = OF_REPLICAS) -> Samples:
    """Parses Prometheus text format: values by name and sorted labels.

    Args:
        summed: labels over which values are summed.
    """
    samples: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is not None:
            found = _LABEL.findall(match[2] or "")
            labels = tuple(sorted(label for label in found if label[0] not in summed))
            samples[match[1], labels] = samples.get((match[1], labels), 0.0) + float(match[3])
    return samples


def difference(before: Samples, after: Samples) -> Samples:
    """Subtracts two readings; a sample that is new started at 0."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def total(samples: Samples, name: str, **labels: str) -> float | None:
    """Returns the sum over all samples of a name with these labels; None: there is none."""
    wanted = set(labels.items())
    values = [value for (sample, found), value in samples.items() if sample == name and wanted <= set(found)]
    return sum(values) if values else None


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Returns the values of a name by one of its labels."""
    return {dict(labels).get(label, ""): value for (found, labels), value in samples.items() if found == name}


def hit_rate(samples: Samples, hits: Collection[str]) -> float | None:
    """Returns the share of the verdicts that were looked up whose result is one of ``hits``."""
    results = by_label(samples, "specray_outcomes_total", "result")
    lookups = sum(results.values())
    return sum(results.get(result, 0.0) for result in hits) / lookups if lookups else None


def mean_ms(samples: Samples, name: str) -> float | None:
    """Returns the mean of a histogram of seconds, in milliseconds; None without observations."""
    count = samples.get((f"{name}_count", ()), 0.0)
    return 1e3 * samples[f"{name}_sum", ()] / count if count else None


def histogram_quantile(samples: Samples, name: str, quantile: float) -> float | None:
    """Returns the quantile, linear within its bucket as in PromQL; None without observations."""
    buckets = sorted(
        (math.inf if bound == "+Inf" else float(bound), value)
        for (sample, labels), value in samples.items()
        if sample == f"{name}_bucket"
        for label, bound in labels
        if label == "le"
    )
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = quantile * buckets[-1][1]
    low, num_below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > num_below:
            # The last bucket has no upper end; its lower end is all that is known.
            return (
                low if math.isinf(bound) else low + (bound - low) * (rank - num_below) / (count - num_below)
            )
        low, num_below = bound, count
    return low
