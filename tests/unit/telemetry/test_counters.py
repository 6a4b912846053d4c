"""Fast counters and histograms export the same text as prometheus_client's."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specray.telemetry import counters as counts


def text(registry: CollectorRegistry) -> str:
    """Exported text, without the creation times of the client's own metrics."""
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(line for line in lines if "_created" not in line)


def test_all_kinds_are_exposed_as_the_client_exposes_its_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    made = (
        (counts.Counter, counts.LabelledCounter, counts.Histogram, ours),
        (prometheus_client.Counter, prometheus_client.Counter, prometheus_client.Histogram, theirs),
    )
    for counter_kind, labelled_kind, histogram_kind, registry in made:
        counter = counter_kind("rounds", "Rounds.", registry=registry)
        counter.inc()
        counter.inc(3)
        labelled = labelled_kind("plans", "Plans.", ["overlap", "k"], registry=registry)
        labelled.labels("off", "0").inc()
        labelled.labels("serial", "4").inc(2)
        labelled.labels("off", "0").inc()
        histogram = histogram_kind("wait_seconds", "Waits.", buckets=(0.001, 0.5, 10), registry=registry)
        for value in (0.0, 0.001, 0.0011, 0.5, 7.25, 11.0):
            histogram.observe(value)
    assert text(ours) == text(theirs)
    assert 'plans_total{k="0",overlap="off"} 2.0' in text(ours)


def test_a_value_that_comes_several_times_counts_so_often() -> None:
    registry = CollectorRegistry()
    histogram = counts.Histogram("wait_seconds", "Waits.", buckets=(1, 2), registry=registry)
    histogram.observe(1.5, times=3)
    assert registry.get_sample_value("wait_seconds_count") == 3
    assert registry.get_sample_value("wait_seconds_sum") == 4.5
    assert registry.get_sample_value("wait_seconds_bucket", {"le": "1.0"}) == 0
    assert registry.get_sample_value("wait_seconds_bucket", {"le": "2.0"}) == 3


def test_what_was_never_counted_is_shown_as_nothing_and_labels_once_they_are_asked_for() -> None:
    registry = CollectorRegistry()
    counts.Counter("rounds", "Rounds.", registry=registry)
    plans = counts.LabelledCounter("plans", "Plans.", ["overlap"], registry=registry)
    assert registry.get_sample_value("rounds_total") == 0
    assert registry.get_sample_value("plans_total", {"overlap": "off"}) is None
    plans.labels("off")
    assert registry.get_sample_value("plans_total", {"overlap": "off"}) == 0
    families = {family.name: family.type for family in text_string_to_metric_families(text(registry))}
    assert families == {"rounds": "counter", "plans": "counter"}


def test_one_name_stands_for_one_metric() -> None:
    registry = CollectorRegistry()
    counts.Counter("rounds", "Rounds.", registry=registry)
    with pytest.raises(ValueError, match="rounds"):
        counts.Counter("rounds", "Rounds.", registry=registry)
