"""The text of a registry has every sample but creation times."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specray.metrics.text import registry_text


def test_creation_times_are_left_out_and_nothing_else() -> None:
    registry = CollectorRegistry()
    Counter("rounds", "Rounds _created here.", ["kind"], registry=registry).labels("x_created").inc()
    Gauge("depth", "A depth.", registry=registry).set(3)
    Histogram("wait_seconds", "Waits.", registry=registry, buckets=(1,)).observe(0.5)
    text = registry_text(registry)
    whole = generate_latest(registry).decode()
    dropped = [line for line in whole.splitlines() if line not in text.splitlines()]
    assert [line.split("{")[0].split(" ")[0] for line in dropped if not line.startswith("#")] == [
        "rounds_created",
        "wait_seconds_created",
    ]
    assert 'rounds_total{kind="x_created"} 1.0' in text.splitlines()
    assert "# HELP rounds_total Rounds _created here." in text.splitlines()
