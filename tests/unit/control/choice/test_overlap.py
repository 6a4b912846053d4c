"""Engines overlap where that has brought more than taking turns, whatever was predicted of it."""

from __future__ import annotations

import itertools

import pytest

from specray.control.overlap import DECISION_ROUNDS, KEEP_GAIN, MIN_GAIN, OverlapChoice
from specray.types import Overlap
from tests.unit.control.choice.texts import Machine, Phase, kit, method, text, tokens_per_s
from tests.unit.control.harness import chosen, measured, worked
from tests.unit.router.harness import speculation_config


def after(choice: OverlapChoice, share: float, *, predicted_gain: float, num_decisions: int = 1) -> bool:
    """Whether engines overlap after rounds that brought such a share of what turns promised."""
    for _ in range(num_decisions):
        for _ in range(DECISION_ROUNDS - 1):
            assert not choice.is_due(1, is_drafted=True)
            choice.observe(4, 4 / share, 1)
        choice.observe(4, 4 / share, 1)
        assert choice.is_due(1, is_drafted=True)
        choice.decide(predicted_gain, 1)
    return choice.is_overlapped


@pytest.mark.parametrize(("gain", "is_tried"), [(MIN_GAIN - 0.01, False), (MIN_GAIN + 0.01, True)])
def test_a_prediction_says_what_is_worth_a_try(gain: float, is_tried: bool) -> None:
    assert after(OverlapChoice(speculation_config(overlap="auto")), 1.0, predicted_gain=gain) is is_tried


@pytest.mark.parametrize(("share", "is_kept"), [(KEEP_GAIN - 0.05, False), (1.2, True)])
def test_what_rounds_bring_says_whether_it_is_kept(share: float, is_kept: bool) -> None:
    choice = OverlapChoice(speculation_config(overlap="auto"))
    assert after(choice, 1.0, predicted_gain=1.2)
    assert after(choice, share, predicted_gain=1.2, num_decisions=8) is is_kept


def test_a_try_that_failed_is_repeated_ever_more_rarely() -> None:
    choice = OverlapChoice(speculation_config(overlap="auto"))
    starts = []
    for number in range(400):
        was_overlapped = choice.is_overlapped
        share = 0.7 if was_overlapped else 1.0
        if after(choice, share, predicted_gain=1.2) and not was_overlapped:
            starts.append(number)
    gaps = [later - first for first, later in itertools.pairwise(starts)]
    assert len(gaps) >= 2 and gaps == sorted(gaps) and gaps[-1] > 1.5 * gaps[0]


@pytest.mark.parametrize(
    ("overlap", "is_overlapped"), [("serial", False), ("ahead", True), ("enumerate", True)]
)
def test_what_is_configured_is_no_choice(overlap: str, is_overlapped: bool) -> None:
    choice = OverlapChoice(speculation_config(overlap=overlap))
    assert not any(choice.is_due(1, is_drafted=True) for _ in range(4 * DECISION_ROUNDS))
    assert choice.is_overlapped is is_overlapped


def test_a_draft_on_the_targets_hardware_takes_turns_whatever_is_predicted() -> None:
    controller, stats = measured(overlap="auto", draft_step_s=0.002, hits=0.9)
    controller.allow_overlap(False)
    assert worked(controller, stats) is Overlap.SERIAL
    controller.allow_overlap(True)
    assert worked(controller, stats) is Overlap.ENUMERATE
    # Another draft is leased.
    controller.allow_overlap(False)
    assert controller.is_serial
    assert chosen(controller, stats).overlap is Overlap.SERIAL


@pytest.mark.parametrize("overlap", ["ahead", "enumerate"])
def test_a_way_that_is_configured_holds_for_any_draft(overlap: str) -> None:
    controller, _ = measured(overlap=overlap)
    controller.allow_overlap(False)
    assert not controller.is_serial


def test_rounds_without_the_draft_count_for_little() -> None:
    choice = OverlapChoice(speculation_config(overlap="auto"))
    assert not any(choice.is_due(1, is_drafted=False) for _ in range(DECISION_ROUNDS))
    assert any(choice.is_due(1, is_drafted=False) for _ in range(7 * DECISION_ROUNDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slowdown", "least"), [(1.0, 1.15), (2.0, 1.0)], ids=["hardware of its own", "shared cores"]
)
def test_overlap_is_taken_where_the_draft_has_hardware_of_its_own(slowdown: float, least: float) -> None:
    """Six texts of 200 tokens beside taking turns; tries are part of the time."""
    base = kit(Machine(0.3, 0.02, slowdown), [text([Phase(200, 0.05, 0.6)], seed) for seed in range(3)])
    turns, auto = (
        tokens_per_s(method(base, "service", overlap=overlap), num_requests=6)
        for overlap in ("serial", "auto")
    )
    assert auto >= least * turns


@pytest.mark.slow
@pytest.mark.parametrize("draft_step", [0.2, 0.5])
def test_where_a_text_repeats_its_prompt_overlapping_costs_nothing(draft_step: float) -> None:
    """The draft is not asked between two repetitions for what it could have prepared in other texts."""
    base = kit(Machine(draft_step), [text([Phase(200, 0.97, 0.6)], seed) for seed in range(2)])
    alone, service = (tokens_per_s(method(base, name), num_requests=8) for name in ("ngram", "service"))
    assert service >= 0.94 * alone
