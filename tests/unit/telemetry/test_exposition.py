"""Merged metrics of several replicas, read back by Prometheus's own parser."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specray.telemetry.exposition import labelled, merged, registry_text
from specray.telemetry.metrics import RouterMetrics


def replica_text(amount: float) -> str:
    registry = CollectorRegistry()
    Counter("a", "Counted.", registry=registry).inc(amount)
    by_result = Counter("b", 'With "labels".', ["result"], registry=registry)
    by_result.labels('odd } { = " \\ value').inc(amount)
    Gauge("c", "Now.", registry=registry).set(-amount)
    Histogram("d", "Spread.", buckets=(1,), registry=registry).observe(amount)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found), "a sample stands twice"
    return dict(found)


def test_every_sample_of_every_replica_keeps_its_value_and_says_where_it_is_from() -> None:
    texts = {name: replica_text(amount) for name, amount in (("x", 1.0), ("y", 2.0))}
    text = merged(labelled(body, {"deployment": "Router", "replica": name}) for name, body in texts.items())
    expected = {
        (sample, labels | {("deployment", "Router"), ("replica", name)}): value
        for name, body in texts.items()
        for (sample, labels), value in samples(body).items()
    }
    assert samples(text) == expected


def test_a_family_stands_once_with_all_its_samples() -> None:
    text = merged(labelled(replica_text(1), {"replica": name}) for name in "xyz")
    names = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(set(names)) == len(names)
    lines = text.splitlines()
    start = lines.index("# TYPE a_total counter")
    assert [line.split("{")[0] for line in lines[start + 1 : start + 4]] == ["a_total"] * 3


def test_of_two_wordings_of_one_metric_the_first_is_kept() -> None:
    old, new = "# HELP a Old.\n# TYPE a gauge\na 1.0\n", "# HELP a New.\n# TYPE a gauge\na 2.0\n"
    text = merged([labelled(old, {"replica": "x"}), labelled(new, {"replica": "y"})])
    assert text == '# HELP a Old.\n# TYPE a gauge\na{replica="x"} 1.0\na{replica="y"} 2.0\n'


def test_values_of_labels_are_escaped() -> None:
    text = labelled('a{b="c"} 1.0\na 2.0\na{} 3.0\n', {"replica": 'a"b\\c\nd'})
    first, second, third = text.splitlines()
    assert first == 'a{replica="a\\"b\\\\c\\nd",b="c"} 1.0'
    assert second == 'a{replica="a\\"b\\\\c\\nd"} 2.0'
    assert third == 'a{replica="a\\"b\\\\c\\nd"} 3.0'


@pytest.mark.parametrize("labels", [{}, {"replica": "x"}], ids=["no labels", "labels"])
def test_the_routers_own_text_passes(labels: dict[str, str]) -> None:
    metrics = RouterMetrics()
    metrics.observe_round(3, 2)
    metrics.observe_lookup("hit", 2)
    text = metrics.text()
    expected = {(name, found | set(labels.items())): value for (name, found), value in samples(text).items()}
    assert samples(merged([labelled(text, labels)])) == expected


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
