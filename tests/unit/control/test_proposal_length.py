"""How long proposals are: the K of a plan, and proposals of any length under a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel, DraftTimes
from specray.control.estimators import Rate
from specray.control.expectations import ExpectedRound, expected_drafts, expected_steps, expected_tokens
from specray.control.goodput import (
    ANY_K,
    AUTO_K,
    HANDLING_S,
    LONGER_GAIN,
    MANY_SESSIONS,
    MAX_SHARED_K,
    GoodputModel,
)
from specray.control.state import Plan, SessionStats
from specray.requests import SpeculationParams
from specray.types import Overlap, Verification
from tests.unit.control.harness import chosen, goodput_of, measured, times
from tests.unit.router.harness import request, speculation_config


def test_k_grows_with_acceptance() -> None:
    ks = []
    for acceptance in (0.3, 0.6, 0.9):
        controller, stats = measured(acceptance=acceptance, overlap="serial")
        ks.append(chosen(controller, stats).num_speculative_tokens)
    assert ks == sorted(ks) and ks[0] < ks[2]


def test_serial_k_is_the_optimum_of_the_formula() -> None:
    controller, stats = measured(acceptance=0.6, overlap="serial", draft_step_s=0.004)
    for _ in range(1000):
        controller.observe_proposal(stats, 8, 8)
    acceptance = stats.acceptance.value

    def goodput(k: int) -> float:
        return (1 - acceptance ** (k + 1)) / (1 - acceptance) / (0.020 + 0.004 * k + 0.0002)

    assert chosen(controller, stats).num_speculative_tokens == max(AUTO_K, key=goodput)


def test_rounds_under_a_bound_are_sums_over_the_tokens_that_come() -> None:
    # 1, then half of the times another, then half of those times a third.
    assert expected_drafts(3, 0.5) == pytest.approx(1 + 0.5 + 0.25)
    assert expected_drafts(3, 1.0) == 3
    assert expected_tokens(0.8, 3, 0.5) == pytest.approx(1 + 0.8 + 0.5 * 0.8**2 + 0.25 * 0.8**3)
    assert expected_tokens(0.8, 3) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)


def test_a_draft_that_ends_its_proposals_early_is_expected_to_do_so() -> None:
    controller, stats = measured(overlap="serial")
    for _ in range(200):
        controller.observe_proposal(stats, 8, 2)
    # One continuation and one end for each proposal; some of what was calibrated before is left.
    goes_on = stats.continuation.value
    assert goes_on == pytest.approx(0.5, abs=0.02)
    expected = expected_tokens(stats.acceptance.value, 8, goes_on)
    drafted_s = 0.004 * (expected_drafts(8, goes_on) + 1 - goes_on**7)
    goodput = controller.goodput(Plan(8), stats, 1)
    assert goodput == pytest.approx(expected / (0.020 + drafted_s + 0.0002), rel=0.01)


def test_a_draft_token_must_promise_what_its_row_and_its_step_could_bring() -> None:
    controller, stats = measured(overlap="serial", rows_s=0.0005, draft_step_s=0.001)
    for num_running in (1, 4):
        stats.rounds_to_replan = 0
        plan = chosen(controller, stats, num_running=num_running)
        rate = num_running * controller.goodput(plan, stats, num_running)
        # Of four proposals others are as long as one that ends a token earlier: its step is taken for them.
        assert plan.min_acceptance == pytest.approx(rate * (0.0005 + 0.001 / num_running**2), rel=0.05)


def test_a_draft_token_of_many_costs_its_part_of_a_step_that_is_taken_anyway() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    controller.cost_model.expect_draft(times((1, 0.001), (32, 0.0041)), 0.0)
    line_s = goodput_of(controller).draft_token_s
    assert line_s(1, 0.020) == pytest.approx(0.001)
    assert line_s(32, 0.020) == pytest.approx(0.0001 + 0.0009 / 32**2)


def test_rows_of_many_sessions_cost_what_they_do_beyond_the_first_half() -> None:
    """The first 16 draft rows take 20 ms, the next 16 take 4; nobody leaves out the first ones."""
    controller = Controller(speculation_config(overlap="serial"))
    for rows, seconds in ((8, 0.020), (24, 0.040), (40, 0.044)):
        for _ in range(3):
            controller.cost_model.target.add(rows, seconds, is_overlapped=False)
    controller.cost_model.expect_draft(times((1, 1e-9)), 0.0)
    stats = controller.start_session(request())
    stats.continuation = Rate(1.0)
    rate = controller.goodput(Plan(4), stats, 8)
    assert goodput_of(controller).break_even(Plan(4), stats, 8) == pytest.approx(
        8 * rate * 0.004 / 16, rel=1e-3
    )


def judge(
    controller: Controller, stats: SessionStats, num_asked: int, num_drafts: int, num_accepted: int
) -> None:
    """One round with a proposal under a bound."""
    controller.observe_proposal(stats, num_asked, num_drafts)
    controller.observe_round(stats, num_drafts, num_accepted)


def test_proposals_of_any_length_are_worth_what_they_came_to() -> None:
    controller, stats = measured(overlap="serial", acceptance=0.95, draft_step_s=0.001)
    for _ in range(400):
        judge(controller, stats, ANY_K, 10, 10)
    plan = chosen(controller, stats)
    assert plan == Plan(ANY_K)
    # Some of what was calibrated before is left. One more is drafted, before which the proposal ends.
    drafts, accepted = stats.bounded.num_drafts.value, stats.bounded.num_accepted.value
    assert (drafts, accepted) == pytest.approx((9.56, 9.48), abs=0.01)
    drafted_s = 0.001 * num_steps(ANY_K, [1 - 1 / drafts], 1)
    assert 0.0100 < drafted_s < 0.0109
    assert controller.goodput(plan, stats, 1) == pytest.approx(
        (1 + accepted) / (0.0202 + drafted_s + HANDLING_S)
    )


def test_the_router_takes_its_time_for_what_a_miss_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, stats = measured(overlap="enumerate", hits=0.75)
    plan = Plan(4, Overlap.ENUMERATE, 1)
    controller.cost_model.hit_rate[1] = Rate(0.75)
    before = 1 / controller.goodput(plan, stats, 8)
    monkeypatch.setattr("specray.control.goodput.HANDLING_S", HANDLING_S + 0.001)
    more_s = 0.25 * 8 * 0.001
    assert 1 / controller.goodput(plan, stats, 8) - before == pytest.approx(
        more_s / expected_tokens(stats.acceptance.value, 4)
    )


def test_proposals_of_any_length_are_left_when_little_of_them_is_accepted() -> None:
    controller, stats = measured(overlap="serial", rows_s=0.0005, draft_step_s=0.001)
    for _ in range(400):
        judge(controller, stats, ANY_K, 30, 2)
    assert 0 < chosen(controller, stats).num_speculative_tokens < 8


def test_nobody_accepts_more_than_acceptance_allows_of_however_many() -> None:
    controller, stats = measured(overlap="serial", acceptance=0.6)
    acceptance = stats.acceptance.value
    assert stats.bounded.num_accepted.value == 3.0
    assert controller.goodput(Plan(ANY_K), stats, 1) == pytest.approx(
        (1 + acceptance / (1 - acceptance)) / (0.020 + num_steps(ANY_K, [3 / 4], 1) * 0.004 + 0.0002),
        rel=0.02,
    )


def test_only_rounds_whose_proposal_could_have_any_length_tell_of_such_ones() -> None:
    controller, stats = measured(overlap="serial")
    for _ in range(50):
        judge(controller, stats, 8, 8, 8)
        # Outcomes, fallback and proposals without a bound.
        controller.observe_round(stats, 3, 3)
    assert (stats.bounded.num_drafts.value, stats.bounded.num_accepted.value) == (4.0, 3.0)
    judge(controller, stats, ANY_K, 13, 9)
    controller.observe_round(stats, 3, 3)
    assert stats.bounded.num_drafts.value == pytest.approx((4 * 4.0 + 13) / 5)
    assert stats.bounded.num_accepted.value == pytest.approx((4 * 3.0 + 9) / 5)
    new = controller.start_session(request())
    assert new.bounded.num_drafts.value == pytest.approx((4 * 4.0 + 13) / 5)


def num_steps(num_drafts: int, continuations: Sequence[float], num_proposals: int) -> float:
    """Of the draft, on average."""
    return sum(step.chance for step in expected_steps(num_drafts, continuations, num_proposals))


def test_all_wait_for_the_longest_proposal_and_rows_are_those_of_the_mean() -> None:
    """One session that is sure of all its tokens, three that end each proposal at once."""
    assert num_steps(1, [0.5, 1.0], 2) == 1.0
    # The three draft the token before which they end; after that the first is alone.
    assert expected_steps(4, [1.0, 0.0, 0.0, 0.0], 4) == [(1.0, 4.0), (1.0, 4.0), (1.0, 1.0), (1.0, 1.0)]
    # Alone it ends after one in half of the cases, after two in a quarter, and drafts the token before.
    assert num_steps(4, [0.5], 1) == pytest.approx(1 + 1 + 0.5 + 0.25)
    # Of two, one at least goes on more often; a sample of one stands for both.
    assert num_steps(4, [0.5, 0.5], 2) == pytest.approx(1 + 1 + 0.75 + 1 - 0.75**2)
    assert num_steps(4, [0.5], 2) == pytest.approx(num_steps(4, [0.5, 0.5], 2))
    # What happens in less than a hundredth of the rounds is left out.
    assert [step.chance for step in expected_steps(8, [0.05], 1)] == pytest.approx([1.0, 1.0, 0.05])
    measured_times = CostModel()
    for rows in (4, 8, 16, 64):
        for _ in range(3):
            measured_times.target.add(rows, 0.010 + 0.001 * rows)
    measured_times.draft.expect({1: 0.001, 4: 0.002})
    model = GoodputModel(speculation_config(), "model", measured_times)
    rounds = [ExpectedRound(4.0, 5.0, 1.0), *(ExpectedRound(0.0, 1.0, 0.0) for _ in range(3))]
    # Each begins with the two tokens that a round commits on average: as six proposals, by half a row each.
    read_s = (6 - 4) / 3 * 0.001
    tokens, seconds = 5 ** (1 / 4), 0.018 + 2 * 0.002 + 2 * 0.001 + read_s + 4 * HANDLING_S
    assert model.serial_goodput(4, rounds, 4) == pytest.approx(tokens / seconds)
    # And what four proposals take beside their steps: twice what one does.
    measured_times.draft._overhead = 0.5
    assert model.serial_goodput(4, rounds, 4) == pytest.approx(tokens / (seconds + 2 * 0.0005))


def test_a_plan_for_all_is_not_as_long_as_the_surest_session_would_like() -> None:
    controller, _ = measured(verify_s=0.020, draft_step_s=0.002, overlap="serial")
    sure, others = (
        controller.start_session(request()),
        [controller.start_session(request()) for _ in range(7)],
    )
    for stats, rate in ((sure, 0.97), *((other, 0.5) for other in others)):
        stats.acceptance, stats.continuation = Rate(rate), Rate(rate)
    goodput_model = goodput_of(controller)
    alone = goodput_model.best(goodput_model.plans(sure), sure, 8)
    joint = goodput_model.best_for_all([sure, *others], 8, None)
    assert joint.num_speculative_tokens < alone.num_speculative_tokens
    # Sure sessions have what they like, but for a step or two that bring next to nothing.
    surest = goodput_model.best_for_all([sure], MANY_SESSIONS - 1, None)
    alone = goodput_model.best(goodput_model.plans(sure), sure, MANY_SESSIONS - 1)
    most, least = (controller.goodput(plan, sure, MANY_SESSIONS - 1) for plan in (alone, surest))
    assert alone.num_speculative_tokens > MAX_SHARED_K and LONGER_GAIN * least >= most
    # Many never wait for longer ones, whatever these promise.
    for count, longest in ((MANY_SESSIONS - 1, 10), (MANY_SESSIONS, MAX_SHARED_K), (32, MAX_SHARED_K)):
        assert goodput_model.best_for_all([sure], count, None).num_speculative_tokens == longest
    # What all do is kept while another plan promises little more.
    near = next(k for k in reversed(AUTO_K) if k < joint.num_speculative_tokens)
    assert goodput_model.best_for_all([sure, *others], 8, Plan(near)) == Plan(near)


def test_what_a_proposal_takes_whatever_its_length_is_no_part_of_its_steps() -> None:
    """2 ms a step, and 3 ms beside, of eight sequences: steps that were expected stay what they are."""
    measured_times = CostModel()
    measured_times.draft.expect({1: 0.002, 8: 0.002})
    for index in range(300):
        num_steps = (1, 2, 7)[index % 3]
        measured_times.observe_proposals([num_steps] * 8, 0.003 + 0.002 * num_steps, 0.0)
    assert measured_times.draft.overhead_s(8) == pytest.approx(0.003, rel=0.05)
    assert measured_times.draft_step_s(8, 1.0) == pytest.approx(0.002, rel=0.05)
    # A draft that is as fast as was calibrated has none.
    for index in range(300):
        num_steps = (1, 2, 7)[index % 3]
        measured_times.observe_proposals([num_steps] * 8, 0.002 * num_steps, 0.0)
    assert measured_times.draft.overhead_s(8) < 0.0003


def test_tokens_that_a_proposal_begins_with_are_rows_of_its_first_step() -> None:
    """Some proposal is of a session that the draft has not been told of for long."""
    times = DraftTimes()
    times.expect({1: 0.001, 32: 0.002, 64: 0.003})
    for _ in range(100):
        # One step of 1 + 62 / 2 rows, one of one.
        times.add([2], 0.002 + 0.001, num_read=63)
    assert times.step_s(1) == pytest.approx(0.001, rel=0.01)
    assert times.overhead_s(1) < 1e-5, "it did not take longer than its tokens do"
    assert times.unread_s(1, 63) == pytest.approx(0.001, rel=0.01)
    assert times.unread_s(1, 1) == 0.0


def test_what_one_proposal_takes_besides_is_not_believed_of_each_of_many() -> None:
    times = DraftTimes()
    times.expect({1: 0.001, 64: 0.002})
    for index in range(200):
        num_steps = 1 + index % 3
        times.add([num_steps], 0.0003 + 0.001 * num_steps)
    assert times.overhead_s(1) == pytest.approx(0.0003, rel=0.1)
    assert times.overhead_s(64) == pytest.approx(8 * 0.0003, rel=0.1)


def test_rows_that_the_weights_hide_cost_nothing_in_the_bound() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    stats = controller.start_session(request())
    for rows, seconds in ((1, 0.020), (9, 0.020), (18, 0.040), (64, 0.150)):
        controller.cost_model.target.add(rows, seconds, is_overlapped=False)
    for _ in range(10):
        controller.cost_model.observe_proposals([4], 4 * 0.001, 0.0)
    plan = chosen(controller, stats)
    # 8 draft tokens are calibrated: rows 2 to 9.
    assert plan == Plan(ANY_K)
    assert plan.min_acceptance == pytest.approx(0.001 * controller.goodput(plan, stats, 1), abs=0.001)


def test_what_proposals_of_any_length_once_came_to_is_doubted_while_others_are_chosen() -> None:
    controller, stats = measured(overlap="serial", rows_s=0.0005, draft_step_s=0.001)
    for _ in range(50):
        judge(controller, stats, ANY_K, 30, 2)
    before = stats.bounded.num_drafts.value
    for _ in range(40):
        stats.rounds_to_replan = 0
        assert chosen(controller, stats).num_speculative_tokens < ANY_K
        assert stats.bounded.num_drafts.value <= before
    assert 4.0 < stats.bounded.num_drafts.value < before - 4


def test_draft_tokens_drawn_for_rejection_are_not_judged() -> None:
    controller, _ = measured(overlap="serial", rows_s=0.0005)
    rejection = controller.start_session(request(temperature=1.0, verification=Verification.REJECTION))
    plan = chosen(controller, rejection)
    assert 0 < plan.num_speculative_tokens < ANY_K and plan.min_acceptance == 0.0
    greedy = controller.start_session(request(temperature=0.0, verification=Verification.REJECTION))
    assert chosen(controller, greedy).min_acceptance > 0.0


@pytest.mark.parametrize(
    "config", [{"overlap": "enumerate"}, {"overlap": "serial", "num_speculative_tokens": 4}]
)
def test_a_k_that_was_asked_for_and_outcomes_have_no_bound(config: dict[str, Any]) -> None:
    controller, stats = measured(rows_s=0.0005, **config)
    plan = chosen(controller, stats)
    assert not plan.is_off and plan.min_acceptance == 0.0


def test_drafts_without_a_model_have_no_bound() -> None:
    controller, _ = measured(overlap="serial", rows_s=0.0005)
    local = controller.length_of("ngram", prior_acceptance=0.9)
    plan = chosen(local, local.start_session(request()))
    assert not plan.is_off and plan.min_acceptance == 0.0


@pytest.mark.parametrize("num_running", [1, 8])
def test_what_drafts_on_the_target_ends_where_its_row_breaks_even(num_running: int) -> None:
    """Its own time is the target's: no draft step counts, whatever a draft model takes."""
    bounds = []
    for rows_s in (0.0, 0.0005, 0.002):
        controller, _ = measured(rows_s=rows_s, draft_step_s=0.5, acceptance=0.8, overlap="serial")
        features = controller.length_of("features", prior_acceptance=0.8)
        plan = chosen(features, features.start_session(request()), num_running=num_running)
        assert not plan.is_off
        bounds.append(plan.min_acceptance)
        others = controller.length_of("ngram", prior_acceptance=0.8)
        assert chosen(others, others.start_session(request())).min_acceptance == 0
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[2] > 0.05


def test_what_drafts_on_the_target_has_no_bound_under_rejection_or_a_set_k() -> None:
    controller, _ = measured(rows_s=0.002, acceptance=0.8, overlap="serial")
    features = controller.length_of("features", prior_acceptance=0.8)
    sampled = request(temperature=1.0, verification=Verification.REJECTION)
    fixed = request(speculation=SpeculationParams(num_speculative_tokens=4))
    for stats in (features.start_session(sampled), features.start_session(fixed)):
        plan = chosen(features, stats)
        assert not plan.is_off and plan.min_acceptance == 0
