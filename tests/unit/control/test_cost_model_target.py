"""What target steps take: by their rows, by what their sequences hold, and apart from those with prompts."""

from __future__ import annotations

import math

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel
from specray.control.target_times import TargetTimes
from specray.engine_info import StepTime
from tests.unit.router.harness import speculation_config


def reading(token_s: float = 2e-6) -> TargetTimes:
    """10 ms for eight rows, seen beside four sequences of 500 tokens: 2 microseconds for each of them."""
    target = TargetTimes(context_token_s=token_s)
    for _ in range(3):
        target.add(8, 0.014, num_sequences=4, num_context_tokens=2000)
    return target


def test_what_contexts_take_is_left_out_and_added_for_as_many_sequences_as_there_are() -> None:
    target = reading()
    assert target.rounds[False].predict(8) == pytest.approx(0.010)
    assert target.context_len == 500.0
    predicted = [target.predict(8, num_sequences) for num_sequences in (0, 2, 4, 16)]
    assert predicted == pytest.approx([0.010, 0.012, 0.014, 0.026])


def test_longer_contexts_make_the_next_steps_longer_and_their_rows_no_dearer() -> None:
    target = reading()
    target.add(8, 0.018, num_sequences=4, num_context_tokens=4000)
    assert target.rounds[False].predict(8) == pytest.approx(0.010)
    # A tenth of the way from 500 to 1000 tokens.
    assert target.context_len == pytest.approx(550.0)
    assert target.predict(8, 4) == pytest.approx(0.010 + 4 * 550 * 2e-6)


def test_contexts_of_which_the_engine_says_nothing_are_part_of_the_rows() -> None:
    target = reading(token_s=0.0)
    assert [target.predict(8, num_sequences) for num_sequences in (1, 4, 16)] == [0.014, 0.014, 0.014]


def test_rows_take_a_tenth_of_a_step_at_least_whatever_is_said_of_its_context() -> None:
    target = TargetTimes(context_token_s=1.0)
    target.add(8, 0.010, num_sequences=1, num_context_tokens=1000)
    assert target.rounds[False].predict(8) == pytest.approx(0.001)


def test_on_a_slow_machine_contexts_take_longer_too() -> None:
    target = TargetTimes(context_token_s=2e-6)
    target.rounds[False].load_factor = 2.0
    for _ in range(3):
        target.add(8, 0.028, num_sequences=4, num_context_tokens=2000)
    assert target.load_factor == 2.0
    assert [target.predict(8, num_sequences) for num_sequences in (0, 4)] == pytest.approx([0.020, 0.028])


def test_a_step_beside_a_draft_takes_a_tenth_longer_with_its_contexts_until_one_is_measured() -> None:
    target = reading()
    assert target.predict(8, 4, is_overlapped=True) == pytest.approx(1.1 * 0.014)
    for _ in range(3):
        target.add(8, 0.024, num_sequences=4, num_context_tokens=2000, is_overlapped=True)
    assert target.predict(8, 4, is_overlapped=True) == pytest.approx(0.024)
    assert target.predict(8, 4) == pytest.approx(0.014)


@pytest.mark.parametrize("num_prompts", [1, 40])
def test_steps_that_fill_in_prompts_leave_what_is_known_of_rounds_alone(num_prompts: int) -> None:
    target = reading()
    for _ in range(num_prompts):
        target.add(8, 0.050, num_sequences=1, num_context_tokens=10_000, has_prompt=True)
    for _ in range(num_prompts):
        # Their machine's pace is theirs as well.
        target.add(8, 0.090, num_sequences=1, num_context_tokens=10_000, has_prompt=True)
    assert target.prompts and (target.prompts.predict(8) or 0.0) > 0.025
    assert (target.context_len, target.load_factor) == (500.0, 1.0)
    assert target.predict(8, 4) == pytest.approx(0.014)


@pytest.mark.parametrize("said", [-1e-6, math.nan, math.inf])
def test_contexts_that_are_said_to_take_less_than_nothing_or_no_number_take_none(said: float) -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_target([StepTime(1, 0.010)], 0.0, context_token_s=said)
    for _ in range(3):
        controller.cost_model.target.add(
            8, 0.010, is_overlapped=False, num_sequences=4, num_context_tokens=2000
        )
    assert [controller.cost_model.usual_verify_s(8, count) for count in (1, 4, 16)] == pytest.approx(
        [0.010, 0.010, 0.010]
    )


def test_what_the_engine_says_of_contexts_is_part_of_what_a_step_is_expected_to_take() -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_target([StepTime(1, 0.010), StepTime(8, 0.010)], 0.001, context_token_s=2e-6)
    assert controller.cost_model.usual_verify_s(8, 4) == pytest.approx(0.011)
    # From the first round on it is known how long contexts are; one step says nothing of its rows.
    controller.cost_model.target.add(8, 0.030, is_overlapped=False, num_sequences=4, num_context_tokens=2000)
    assert controller.cost_model.usual_verify_s(8, 4) == pytest.approx(0.015)


def test_contexts_take_as_long_as_steps_of_their_own_kind_say() -> None:
    """Rounds beside a working draft have become twice as long; the others are as they were."""
    target = TargetTimes(context_token_s=2e-6)
    for is_overlapped, factor in ((False, 1.0), (True, 1.0), (True, 2.0)):
        for _ in range(200):
            target.add(
                8,
                0.014 * factor,
                num_sequences=4,
                num_context_tokens=2000,
                is_overlapped=is_overlapped,
            )
    assert target.predict(8, 4) == pytest.approx(0.014, rel=1e-3)
    assert target.predict(8, 4, is_overlapped=True) == pytest.approx(0.028, rel=0.02)


def test_prompts_have_a_throughput_of_their_own_in_which_old_steps_fade() -> None:
    times = TargetTimes()
    times.add(100, 0.5, has_prompt=True)
    times.add(5, 4.0)
    assert times.num_prompt_rows / times.prompts_s == 200.0
    times.add(300, 0.525, has_prompt=True)
    assert times.num_prompt_rows / times.prompts_s == pytest.approx((95 + 300) / (0.475 + 0.525))


def test_further_rows_take_a_share_of_the_context() -> None:
    """As of latent attention: what a context takes grows with the rows that see it."""
    cost = CostModel()
    steps = [StepTime(1, 0.010), StepTime(8, 0.010)]
    cost.expect_target(steps, 0.0, context_token_s=1e-6, context_row_share=0.5)
    target = cost.target
    # Two sequences of 1,000 tokens with four rows each: 2 + 0.5 * 6 readings of a context.
    target.add(8, 0.010 + 5 * 1000 * 1e-6, num_sequences=2, num_context_tokens=2000)
    assert target.predict(8, 2) == pytest.approx(0.015, rel=1e-6)
    assert target.predict(2, 2) == pytest.approx(0.012, rel=1e-6)
