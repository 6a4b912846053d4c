"""Reads a server's /metrics, and computes figures from the difference of two readings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_REPLICA_LABELS = ("application", "deployment", "replica")

Labels = tuple[tuple[str, str], ...]
Samples = Mapping[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class ServerStats:
    """The server's own figures of one pass; None: the server does not report it."""

    round_overhead_ms_p50: float | None
    verify_forward_ms_mean: float | None
    draft_forward_ms_mean: float | None
    num_rounds: float
    hit_rate: float | None
    """Share of looked-up verdicts whose continuation was ready."""


def parse_samples(text: str) -> Samples:
    """Parses Prometheus text format: values by name and sorted labels, summed over all replicas."""
    samples: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is not None:
            found = _LABEL.findall(match[2] or "")
            labels = tuple(sorted(label for label in found if label[0] not in _REPLICA_LABELS))
            samples[match[1], labels] = samples.get((match[1], labels), 0.0) + float(match[3])
    return samples


def difference(before: Samples, after: Samples) -> Samples:
    """Subtracts two readings; a sample that is new started at 0."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def server_stats(samples: Samples) -> ServerStats:
    """Computes the figures of a pass from the difference of two readings."""
    hits, lookups = 0.0, 0.0
    for (name, labels), value in samples.items():
        if name == "specray_outcomes_total":
            lookups += value
            hits += value if ("result", "hit") in labels else 0.0
    overhead_s = histogram_quantile(samples, "specray_round_overhead_seconds", 0.5)
    return ServerStats(
        round_overhead_ms_p50=None if overhead_s is None else 1e3 * overhead_s,
        verify_forward_ms_mean=_mean_ms(samples, "specray_verify_forward_seconds"),
        draft_forward_ms_mean=_mean_ms(samples, "specray_draft_forward_seconds"),
        num_rounds=samples.get(("specray_rounds_total", ()), 0.0),
        hit_rate=hits / lookups if lookups else None,
    )


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


def _mean_ms(samples: Samples, name: str) -> float | None:
    count = samples.get((f"{name}_count", ()), 0.0)
    return 1e3 * samples[f"{name}_sum", ()] / count if count else None
