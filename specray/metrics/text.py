"""The Prometheus text of a registry, without the creation times of its metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

_SUFFIX = "_created"


def registry_text(registry: CollectorRegistry) -> str:
    """Returns all metrics in Prometheus text format.

    ``prometheus_client`` adds a gauge with its creation time to each of its own counters and histograms: a
    third of all series, which nobody reads.
    """
    lines = generate_latest(registry).decode().splitlines()
    return "".join(f"{line}\n" for line in lines if not _name(line).endswith(_SUFFIX))


def _name(line: str) -> str:
    if line.startswith("# "):
        return line.split(" ", 3)[2]
    return line.partition("{")[0].partition(" ")[0]
