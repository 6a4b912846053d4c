"""Metrics of a Draft replica."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from specray.fakes import FakeDraft, NoisyGuesser, ToyModel
from specray.telemetry.draft import DraftMetrics


def shown(text: str) -> dict[str, float]:
    return {
        sample.name.removeprefix("specray_draft_replica_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_draft_shows_its_engine_and_who_uses_it() -> None:
    info = replace(
        FakeDraft(NoisyGuesser(ToyModel())).info,
        num_blocks=40,
        num_blocks_in_use=7,
        busy_share=0.25,
        num_routers=3,
    )
    assert shown(DraftMetrics().text(info)) == {
        "busy_ratio": 0.25,
        "routers": 3.0,
        "blocks": 40.0,
        "blocks_in_use": 7.0,
    }


def test_a_draft_without_an_engine_shows_zeros() -> None:
    metrics = DraftMetrics()
    metrics.text(FakeDraft(NoisyGuesser(ToyModel())).info)
    assert set(shown(metrics.text(None)).values()) == {0.0}
