"""What is chosen when: modes, K, fan-out, and when to leave speculation off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel, DraftTimes
from specray.control.estimators import Average, OutcomesTime, Rate, TimeTable, chain_trials
from specray.control.experiments import EXPLORATION_INTERVAL_ROUNDS, EXPLORATION_ROUNDS
from specray.control.goodput import (
    ANY_K,
    AUTO_K,
    HANDLING_S,
    LONGER_GAIN,
    MANY_SESSIONS,
    MAX_SHARED_K,
    WIDTHS,
    ExpectedRound,
    GoodputModel,
    expected_drafts,
    expected_steps,
    expected_tokens,
    max_branches,
    prior_hit_rate,
)
from specray.control.mode import MIN_SPEEDUP
from specray.control.state import OFF, OFF_REPLAN_ROUNDS, Plan, SessionStats
from specray.requests import SpeculationParams
from specray.router.proposers.budgets import Budgets
from specray.types import Overlap, StepTime, Verification
from tests.unit.router.harness import request, speculation_config


def budgets(controller: Controller) -> Budgets:
    return Budgets(controller.cost_model, max_k=controller.max_k)


def times(*pairs: tuple[int, float]) -> tuple[StepTime, ...]:
    return tuple(StepTime(num_rows, seconds) for num_rows, seconds in pairs)


def measured(
    *,
    verify_s: float = 0.020,
    draft_step_s: float = 0.004,
    rows_s: float = 0.0,
    acceptance: float = 0.6,
    hits: float = 0.85,
    **config: Any,
) -> tuple[Controller, SessionStats]:
    """A controller and a session that have seen a pair of this speed and agreement."""
    controller = Controller(speculation_config(**config))
    stats = controller.start_session(request())
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        for is_overlapped in (False, True):
            controller.cost_model.target.add(rows, verify_s + rows_s * rows, is_overlapped=is_overlapped)
    for _ in range(10):
        controller.cost_model.observe_proposals([4], 4 * draft_step_s, 0.0002)
        # A branch costs a twentieth of a step: 8 branches of 4 tokens 1.6 steps, besides 5.
        controller.cost_model.observe_outcomes(4, 8, 6.6 * draft_step_s)
    for index in range(200):
        for width in WIDTHS:
            is_hit = index * 37 % 100 < 100 * hits
            controller.observe_lookup(Plan(4, Overlap.ENUMERATE, width), is_hit=is_hit)
        passed = index * 37 % 100 < 100 * acceptance
        controller.observe_round(stats, 1, int(passed))
    stats.plan = None
    stats.rounds_to_replan = 0
    return controller, stats


def chosen(
    controller: Controller, stats: SessionStats, *, num_remaining: int = 100, num_running: int = 1
) -> Plan:
    return controller.plan(stats, num_remaining=num_remaining, num_running=num_running)


# Fixed by configuration or request


@pytest.mark.parametrize("overlap", [Overlap.SERIAL, Overlap.AHEAD, Overlap.ENUMERATE])
def test_configured_mode_and_k_stand(overlap: Overlap) -> None:
    controller, stats = measured(overlap=overlap, num_speculative_tokens=5)
    assert chosen(controller, stats) == Plan(5, overlap)


def test_k_stays_below_what_remains() -> None:
    controller, stats = measured(overlap="serial", num_speculative_tokens=5)
    assert chosen(controller, stats, num_remaining=4).num_speculative_tokens == 3
    assert chosen(controller, stats, num_remaining=1) == OFF


@pytest.mark.parametrize(
    ("wanted", "k"),
    [
        (SpeculationParams(enabled=False), 0),
        (SpeculationParams(enabled=False, num_speculative_tokens=7), 0),
        (SpeculationParams(num_speculative_tokens=7), 7),
        (SpeculationParams(num_speculative_tokens=0), 0),
        (SpeculationParams(), 5),
    ],
)
def test_request_goes_before_configuration(wanted: SpeculationParams, k: int) -> None:
    controller = Controller(speculation_config(num_speculative_tokens=5))
    stats = controller.start_session(request(speculation=wanted))
    assert chosen(controller, stats).num_speculative_tokens == k


def test_draft_that_refused_is_left_alone_for_some_rounds() -> None:
    controller, stats = measured(num_speculative_tokens=3)
    stats.rest_rounds = 2
    for expected in (0, 0, 3):
        assert chosen(controller, stats).num_speculative_tokens == expected
        controller.observe_round(stats, 0, 0)


# Fan-out


def test_fanout_of_each_mode() -> None:
    controller, _ = measured(acceptance=0.58)
    for plan, fanout, most in (
        (Plan(3, Overlap.SERIAL), (), 0),
        (Plan(3, Overlap.AHEAD), (0, 0, 0, 1), 0),
        (Plan(3, Overlap.ENUMERATE, 3), (8, 8, 8, 8), 12),
        (Plan(3, Overlap.ENUMERATE, 1), (8, 8, 8, 8), 4),
        (OFF, (), 0),
    ):
        assert controller.fanout(plan, 3) == fanout
        assert max_branches(plan, 3, num_running=1) == most


def test_fanout_of_a_round_without_draft_tokens_foresees_the_next_token() -> None:
    controller, _ = measured()
    assert controller.fanout(Plan(3, Overlap.AHEAD), 0) == (1,)
    plan = Plan(3, Overlap.ENUMERATE, 3)
    assert (controller.fanout(plan, 0), max_branches(plan, 0, num_running=1)) == ((8,), 3)


def test_long_fallback_gets_no_more_branches_than_the_drafts_own_proposals() -> None:
    numbers = [
        max_branches(Plan(3, Overlap.ENUMERATE, 2), count, num_running=1) for count in (0, 2, 3, 4, 16)
    ]
    assert numbers == [2, 6, 8, 8, 8]


def test_branches_get_fewer_as_load_grows() -> None:
    plan = Plan(3, Overlap.ENUMERATE, 3)
    numbers = [max_branches(plan, 3, num_running=count) for count in (1, 8, 12, 64, 200)]
    assert numbers == [12, 12, 8, 1, 1]


# Auto


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
    line_s = controller._goodput._draft_token_s
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
    assert controller._goodput._break_even(Plan(4), stats, 8) == pytest.approx(
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
    assert (drafts, accepted) == pytest.approx((9.85, 9.56), abs=0.01)
    drafted_s = 0.001 * num_steps(ANY_K, [1 - 1 / drafts], 1)
    assert 0.0103 < drafted_s < 0.0109
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
    assert stats.bounded.num_accepted.value == 4.0
    assert controller.goodput(Plan(ANY_K), stats, 1) == pytest.approx(
        (1 + acceptance / (1 - acceptance)) / (0.020 + 9 * 0.004 + 0.0002), rel=0.02
    )


def test_only_rounds_whose_proposal_could_have_any_length_tell_of_such_ones() -> None:
    controller, stats = measured(overlap="serial")
    for _ in range(50):
        judge(controller, stats, 8, 8, 8)
        # Outcomes, fallback and proposals without a bound.
        controller.observe_round(stats, 3, 3)
    assert (stats.bounded.num_drafts.value, stats.bounded.num_accepted.value) == (8.0, 4.0)
    judge(controller, stats, ANY_K, 13, 9)
    controller.observe_round(stats, 3, 3)
    assert stats.bounded.num_drafts.value == pytest.approx((4 * 8.0 + 13) / 5)
    assert stats.bounded.num_accepted.value == pytest.approx((4 * 4.0 + 9) / 5)
    new = controller.start_session(request())
    assert new.bounded.num_drafts.value == pytest.approx((4 * 8.0 + 13) / 5)


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
    goodput_model = controller._goodput
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
    assert 8.0 < stats.bounded.num_drafts.value < before - 4


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
    local = controller.beside("ngram", prior_acceptance=0.9)
    plan = chosen(local, local.start_session(request()))
    assert not plan.is_off and plan.min_acceptance == 0.0


def test_enumeration_is_chosen_where_it_hides_the_draft() -> None:
    controller, stats = measured(overlap="auto", draft_step_s=0.002, hits=0.9)
    assert chosen(controller, stats).overlap is Overlap.ENUMERATE


def test_overlap_is_not_chosen_where_it_slows_the_target_more_than_it_hides() -> None:
    controller, stats = measured(overlap="auto", draft_step_s=0.002)
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(60):
            controller.cost_model.target.add(rows, 0.035, is_overlapped=True)
    assert chosen(controller, stats).overlap is Overlap.SERIAL


def test_overlap_that_was_never_tried_must_promise_to_hide_more_than_a_little() -> None:
    chosen_ways = []
    for draft_step_s in (0.0003, 0.002):
        controller = Controller(speculation_config(overlap="auto", num_speculative_tokens=4))
        stats = controller.start_session(request())
        for rows in (1, 4, 5, 8):
            controller.cost_model.target.add(rows, 0.020, is_overlapped=False)
        for _ in range(10):
            controller.cost_model.observe_proposals([4], 4 * draft_step_s, 0.0005)
        chosen_ways.append(chosen(controller, stats).overlap)
    assert chosen_ways == [Overlap.SERIAL, Overlap.ENUMERATE]


@pytest.mark.parametrize(
    "pair",
    [
        {"acceptance": 0.02, "hits": 0.0},
        {"draft_step_s": 0.030},
        {"rows_s": 0.020, "acceptance": 0.5},
    ],
    ids=["poor acceptance", "slow draft", "every row costs"],
)
def test_speculation_that_would_lose_is_off(pair: dict[str, Any]) -> None:
    controller, stats = measured(**pair)
    assert chosen(controller, stats) == OFF


def test_large_batches_switch_speculation_off() -> None:
    controller, stats = measured(verify_s=0.018, rows_s=0.002, overlap="serial", acceptance=0.7)
    assert not chosen(controller, stats, num_running=1).is_off
    stats.plan, stats.rounds_to_replan = None, 0
    assert chosen(controller, stats, num_running=64).is_off


def test_plan_is_kept_while_another_promises_little_more() -> None:
    controller, stats = measured(overlap="serial", acceptance=0.6)
    best = chosen(controller, stats)
    near = next(
        Plan(k)
        for k in AUTO_K
        if k != best.num_speculative_tokens
        and controller.goodput(best, stats, 1) < 1.05 * controller.goodput(Plan(k), stats, 1)
    )
    stats.plan, stats.rounds_to_replan = near, 0
    assert chosen(controller, stats) == near
    stats.plan, stats.rounds_to_replan = Plan(16), 0
    assert chosen(controller, stats) == best


def test_explorations_are_rare_and_short_while_speculation_is_off() -> None:
    controller, stats = measured(hits=0.0, acceptance=0.02)
    explorations = 0
    for _ in range(4 * EXPLORATION_INTERVAL_ROUNDS):
        plan = chosen(controller, stats)
        explorations += not plan.is_off
        controller.observe_round(stats, plan.num_speculative_tokens, 0)
    assert 2 * EXPLORATION_ROUNDS <= explorations <= 4 * EXPLORATION_ROUNDS


def test_of_many_sessions_without_speculation_one_tries_for_all() -> None:
    controller, _ = measured(hits=0.0, acceptance=0.02)
    sessions = [controller.start_session(request()) for _ in range(8)]
    num_explorations, widest = 0, 0
    for step in range(5 * EXPLORATION_INTERVAL_ROUNDS):
        plans = [chosen(controller, stats, num_running=8) for stats in sessions]
        for stats, plan in zip(sessions, plans, strict=True):
            controller.observe_round(stats, plan.num_speculative_tokens, 0)
        if step >= EXPLORATION_INTERVAL_ROUNDS:
            num_explorations += sum(not plan.is_off for plan in plans)
            widest = max(widest, sum(not plan.is_off for plan in plans))
    assert widest == 1
    assert 2 * EXPLORATION_ROUNDS <= num_explorations <= 4 * EXPLORATION_ROUNDS


def unread_controller(read_s: float) -> tuple[Controller, SessionStats]:
    """Speculation pays, has been off, and the draft would have to read 224 tokens first."""
    controller, stats = measured(overlap="serial", acceptance=0.7)
    controller.cost_model.draft.expect({1: 0.004, 224: read_s})
    stats.plan = Plan(0)
    return controller, stats


@pytest.mark.parametrize(("num_remaining", "is_off"), [(8, True), (9, False)])
def test_speculation_is_taken_up_only_where_what_is_left_pays_for_what_the_draft_must_read(
    num_remaining: int, is_off: bool
) -> None:
    controller, stats = unread_controller(0.05)
    best = chosen(controller, controller.start_session(request()))
    saved_s = 1 / controller.goodput(Plan(0), stats, 1) - 1 / controller.goodput(best, stats, 1)
    read_s = 8.5 * saved_s
    controller, stats = unread_controller(read_s)
    plan = controller.plan(stats, num_remaining=num_remaining, num_running=1, num_unread=224)
    assert plan.is_off is is_off


def test_what_the_draft_has_been_told_costs_nothing_to_take_up_again() -> None:
    controller, stats = unread_controller(10.0)
    assert not controller.plan(stats, num_remaining=8, num_running=1, num_unread=33).is_off
    stats.plan, stats.rounds_to_replan = Plan(0), 0
    assert controller.plan(stats, num_remaining=8, num_running=1, num_unread=34).is_off


@pytest.mark.parametrize(("read_s", "interval"), [(0.02, 256), (0.08, 800)])
def test_a_try_is_as_rare_as_what_the_draft_must_read_for_it_is_long(read_s: float, interval: int) -> None:
    controller, stats = measured(overlap="serial", acceptance=0.02)
    controller.cost_model.draft.expect({1: 0.004, 224: read_s})
    tries = []
    for step in range(2500):
        plan = controller.plan(stats, num_remaining=1000, num_running=1, num_unread=224)
        if not plan.is_off:
            tries.append(step)
        controller.observe_round(stats, plan.num_speculative_tokens, 0)
    first, *others = tries
    distances = {later - first for later in others if later - first > EXPLORATION_ROUNDS}
    assert interval <= min(distances) <= interval + 40


def test_beside_others_that_speculate_a_session_tries_for_itself() -> None:
    controller, busy = measured(hits=0.0, acceptance=0.02)
    alone = controller.start_session(request())
    tried = 0
    for _ in range(2 * (EXPLORATION_INTERVAL_ROUNDS + OFF_REPLAN_ROUNDS)):
        plan = chosen(controller, alone, num_running=2)
        tried += not plan.is_off
        controller.observe_round(alone, plan.num_speculative_tokens, 0)
        controller.observe_round(busy, 1, 0)
    assert tried == 2 * EXPLORATION_ROUNDS


def slowed(controller: Controller) -> None:
    """The machine takes twice as long from now on; of the target's steps those of one row say so."""
    for _ in range(60):
        controller.cost_model.target.add(1, 0.040, is_overlapped=False)


def test_a_slow_machine_slows_all_ways_of_working_alike() -> None:
    controller, stats = measured(overlap="serial", acceptance=0.7)
    for _ in range(60):
        controller.cost_model.observe_proposals([4], 0.016, 0.010)
        controller.cost_model.target.add(1, 0.020, is_overlapped=False)
    plans = (Plan(0), Plan(1), Plan(4))
    before = [controller.goodput(plan, stats, 1) for plan in plans]
    patience_s = budgets(controller).patience_s()
    slowed(controller)
    shares = [controller.goodput(plan, stats, 1) / fast for plan, fast in zip(plans, before, strict=True)]
    assert shares[0] == pytest.approx(0.5, rel=0.02)
    assert shares[1:] == pytest.approx(2 * shares[:1], rel=0.1)
    assert patience_s is not None and (budgets(controller).patience_s() or 0.0) > 1.5 * patience_s


def test_what_the_draft_took_on_a_slow_machine_is_not_what_it_takes_on_a_fast_one() -> None:
    slow, stats = measured(overlap="serial", acceptance=0.7)
    fast, _ = measured(overlap="serial", acceptance=0.7)
    for _ in range(60):
        slow.cost_model.target.add(1, 0.020, is_overlapped=False)
    slowed(slow)
    for controller, seconds in ((slow, 0.008), (fast, 0.004)):
        for _ in range(60):
            controller.cost_model.observe_proposals([4], 4 * seconds, seconds)
    for _ in range(60):
        slow.cost_model.target.add(1, 0.020, is_overlapped=False)
    assert slow.goodput(Plan(4), stats, 1) == pytest.approx(fast.goodput(Plan(4), stats, 1), rel=0.1)


@pytest.mark.parametrize(("draft_step_s", "is_off"), [(0.0090, False), (0.0098, True)])
def test_speculation_that_promises_a_little_more_than_none_is_not_taken_up(
    draft_step_s: float, is_off: bool
) -> None:
    controller, stats = measured(overlap="serial", acceptance=0.6, draft_step_s=draft_step_s)
    gains = [controller.goodput(Plan(k), stats, 1) / controller.goodput(Plan(0), stats, 1) for k in AUTO_K]
    assert max(gains) > 1.02
    assert (max(gains) < MIN_SPEEDUP) is is_off
    stats.plan = Plan(0)
    assert chosen(controller, stats).is_off is is_off


def test_one_session_that_tries_does_not_make_the_others_try() -> None:
    controller, _ = measured(hits=0.0, acceptance=0.02)
    sessions = [controller.start_session(request()) for _ in range(4)]
    for stats in sessions:
        stats.rounds_off = EXPLORATION_INTERVAL_ROUNDS
    trying = sessions[0]
    trying.plan, trying.is_exploring = Plan(4), True
    for _ in range(4 * EXPLORATION_INTERVAL_ROUNDS):
        controller.observe_round(sessions[1], 0, 0)
    controller._exploration.begin()
    controller.observe_round(trying, 4, 0)
    for stats in sessions[1:]:
        stats.plan, stats.rounds_to_replan = Plan(0), 0
        assert chosen(controller, stats, num_running=4).is_off


def test_what_drafts_without_a_model_is_tried_by_each_session_and_reads_nothing() -> None:
    controller, _ = measured(hits=0.0, acceptance=0.02)
    local = controller.beside("fallback", prior_acceptance=0.02)
    local.cost_model.draft.expect({1: 0.004, 224: 10.0})
    sessions = [local.start_session(request()) for _ in range(4)]
    tried = 0
    for _ in range(EXPLORATION_INTERVAL_ROUNDS + 32):
        for stats in sessions:
            plan = local.plan(stats, num_remaining=50, num_running=4, num_unread=224)
            tried += not plan.is_off
            local.observe_round(stats, plan.num_speculative_tokens, 0)
    assert tried >= 4 * EXPLORATION_ROUNDS
    assert local._draft_prefill_s(sessions[0]) == 0.0


def test_speculation_returns_when_an_exploration_finds_agreement() -> None:
    controller, stats = measured(hits=0.0, acceptance=0.02)
    for _ in range(12 * EXPLORATION_INTERVAL_ROUNDS):
        k = chosen(controller, stats).num_speculative_tokens
        controller.observe_round(stats, k, k)
    assert not chosen(controller, stats).is_off


def test_never_below_098_of_plain_decoding_with_a_draft_that_is_always_wrong() -> None:
    controller, stats = measured(hits=0.0, acceptance=0.02, draft_step_s=0.004)
    seconds = tokens = 0.0
    for _ in range(2000):
        k = chosen(controller, stats).num_speculative_tokens
        controller.observe_round(stats, k, 0)
        seconds += 0.020 + 0.004 * k
        tokens += 1
    assert tokens / seconds > 0.98 / 0.020


def test_first_plan_before_any_measurement_speculates_moderately() -> None:
    controller = Controller(speculation_config(overlap="auto"))
    assert chosen(controller, controller.start_session(request())) == Plan(3, Overlap.ENUMERATE)


def test_patience_is_unknown_before_the_first_proposal_and_follows_the_draft_after() -> None:
    assert budgets(Controller(speculation_config())).patience_s() is None
    controller, _ = measured(num_speculative_tokens=4, draft_step_s=0.010)
    assert budgets(controller).patience_s() == pytest.approx(4 * (6.6 * 0.010 + 0.0002))


def test_a_wider_fanout_is_chosen_while_it_still_hides_behind_the_target() -> None:
    chosen_widths = {}
    for draft_step_s in (0.001, 0.0028, 0.0033):
        controller, stats = measured(draft_step_s=draft_step_s, overlap="enumerate", num_speculative_tokens=4)
        for width, hits in ((1, 55), (2, 75), (3, 84)):
            for index in range(400):
                is_hit = index * 37 % 100 < hits
                controller.observe_lookup(Plan(4, Overlap.ENUMERATE, width), is_hit=is_hit)
        chosen_widths[draft_step_s] = chosen(controller, stats).width
    assert chosen_widths == {0.001: 3, 0.0028: 2, 0.0033: 1}


def test_hits_before_any_lookup_are_those_of_a_trained_pair() -> None:
    assert [prior_hit_rate(width, 0.55) for width in (1, 2, 3)] == pytest.approx([0.55, 0.775, 0.865])


def test_a_replan_that_was_prepared_is_not_repeated_by_the_next_plan() -> None:
    controller, stats = measured(overlap="serial", acceptance=0.6)
    prepared = chosen(controller, stats)
    stats.rounds_to_replan = 2
    controller.prepare(stats, 1)
    assert stats.rounds_to_replan == 2
    stats.rounds_to_replan = 1
    controller.prepare(stats, 1)
    assert stats.rounds_to_replan > 1
    left = stats.rounds_to_replan
    assert chosen(controller, stats) == prepared
    assert stats.rounds_to_replan == left


def test_nothing_is_prepared_for_a_session_without_speculation() -> None:
    controller = Controller(speculation_config())
    stats = controller.start_session(request(speculation=SpeculationParams(enabled=False)))
    controller.prepare(stats, 1)
    assert stats.plan is None


# Estimates


def test_one_measurement_of_outcomes_tells_of_other_widths_and_lengths() -> None:
    times = OutcomesTime()
    assert times.predict(3, 5, step_s=0.01) == pytest.approx(0.01 * (1 + 3 * 1.2))
    times.add(2, 11, 0.01 * 1.4 * (1 + 2 * 1.5), step_s=0.01)
    assert times.predict(3, 5, step_s=0.01) == pytest.approx(1.4 * 0.01 * (1 + 3 * 1.2))
    # Slow steps of one branch say nothing of wide ones that are known.
    times.add(2, 1, 3 * 0.01 * 3, step_s=0.01)
    assert times.predict(2, 1, step_s=0.01) == pytest.approx(3 * 0.01 * 3)
    assert times.predict(2, 11, step_s=0.01) == pytest.approx(1.4 * 0.01 * (1 + 2 * 1.5))


def test_outcomes_cost_what_the_draft_said_of_its_steps() -> None:
    times = OutcomesTime()
    times.expect([(1, 0.004), (8, 0.006), (16, 0.010)])
    widths = [times.predict(2, count, step_s=0.004) / 0.004 for count in (1, 8, 12, 20)]
    assert widths == pytest.approx([3, 1 + 2 * 1.25, 1 + 2 * 1.5, 1 + 2 * 2.0])


def test_what_was_measured_once_is_doubted_replan_by_replan() -> None:
    """A way of working that was slow when it was tried is tried again one day."""
    controller, stats = measured(overlap="auto", draft_step_s=0.002)
    assert chosen(controller, stats).overlap is Overlap.ENUMERATE
    for _ in range(60):
        for num_branches in (1, 4, 8, 20, 40):
            controller.cost_model.observe_outcomes(3, num_branches, 0.080)
    ways = []
    for _ in range(100):
        stats.rounds_to_replan = 0
        ways.append(chosen(controller, stats).overlap)
    assert ways[0] is not Overlap.ENUMERATE
    assert ways[-1] is Overlap.ENUMERATE


def test_many_sessions_doubt_no_faster_than_one() -> None:
    """What one round of reviews forgets does not depend on how many sessions have theirs in it."""
    left = []
    for num_running in (1, 32):
        times = OutcomesTime()
        times.add(3, 4, 0.080, step_s=0.002)
        before = times.predict(3, 4, step_s=0.002)
        controller, stats = measured(overlap="auto")
        controller.cost_model.outcomes = times
        for _ in range(num_running):
            stats.rounds_to_replan = 0
            chosen(controller, stats, num_running=num_running)
        left.append(times.predict(3, 4, step_s=0.002) / before)
    assert left[0] < 0.97
    assert left[1] == pytest.approx(left[0], rel=1e-2)


def test_average_forgets_a_slow_start_and_caps_a_hiccup() -> None:
    average = Average()
    for sample in (1.0, 0.02, 0.021, 0.02, 0.02):
        average.add(sample)
    assert average.value == 0.02
    average.add(5.0)
    assert average.value == pytest.approx(0.02 + (0.03 - 0.02) / 3)
    for _ in range(100):
        average.add(0.024)
    assert average.value == pytest.approx(0.024, rel=1e-3)
    average.add(5.0)
    assert average.value == pytest.approx(0.024 + 0.1 * (0.072 - 0.024), rel=1e-3)


def test_time_table_interpolates_between_and_grows_beyond_as_it_did() -> None:
    table = TimeTable()
    assert table.predict(4) is None
    table.add(4, 0.010)
    table.add(12, 0.018)
    assert [table.predict(rows) for rows in (1, 4, 8, 12, 500)] == pytest.approx(
        [0.010, 0.010, 0.014, 0.018, 0.018 + 0.001 * 488]
    )
    single = TimeTable()
    single.add(1, 0.010)
    assert single.predict(500) == 0.010


def test_large_sizes_share_an_average_of_the_time_by_the_row() -> None:
    """97 to 128 rows are one entry; the least of them must not stand for the largest."""
    table = TimeTable()
    for rows in (97, 98, 128, 99, 97):
        table.add(rows, 0.001 * rows)
    assert table.predict(128) == pytest.approx(0.128)


def test_rate_begins_at_its_prior_and_follows_the_trials() -> None:
    rate = Rate(0.7, weight=8.0)
    assert rate.value == pytest.approx(0.7)
    for _ in range(300):
        rate.add(0, 1)
    assert rate.value < 0.12


@pytest.mark.parametrize(
    ("num_drafts", "num_accepted", "trials"), [(4, 0, 1), (4, 2, 3), (4, 4, 4), (0, 0, 0)]
)
def test_a_rejection_is_one_trial_and_what_follows_it_none(
    num_drafts: int, num_accepted: int, trials: int
) -> None:
    assert chain_trials(num_drafts, num_accepted) == trials
