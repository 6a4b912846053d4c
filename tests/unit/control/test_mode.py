"""Sessions that share steps speculate all or none; drafts at no cost are each session's own affair."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specray.control.controller import Controller
from specray.control.estimators import Rate
from specray.control.expectations import ExpectedRound
from specray.control.goodput import HANDLING_S, MIN_SPEEDUP, GoodputModel, mean_of
from specray.control.mode import (
    DECISION_STEPS,
    FIRST_DECISION_STEPS,
    KEEP_SPEEDUP,
    ModeController,
)
from specray.control.state import OFF, OFF_REPLAN_ROUNDS, BoundedProposalStats, Plan, SessionStats
from specray.requests import SpeculationParams
from tests.unit.control.harness import goodput_of
from tests.unit.router.harness import request, speculation_config


def pair_controller(*, verify_s: float = 0.020, draft_step_s: float = 0.004) -> Controller:
    """Knows a target whose steps take the same at any size."""
    controller = Controller(speculation_config(overlap="serial"))
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        controller.cost_model.target.add(rows, verify_s, is_overlapped=False)
    for _ in range(10):
        controller.cost_model.observe_proposals([4], 4 * draft_step_s, 0.0)
    return controller


def accepting(controller: Controller, acceptance: float) -> SessionStats:
    """A session that has accepted so much of a hundred drafts, of which only it knows."""
    stats = controller.start_session(request())
    for index in range(100):
        stats.acceptance.add(int(index * 37 % 100 < 100 * acceptance), 1)
    return stats


def step(controller: Controller, sessions: list[SessionStats]) -> list[Plan]:
    """One round of each: what they do."""
    num_running = len(sessions)
    plans = [controller.plan(stats, num_remaining=1000, num_running=num_running) for stats in sessions]
    for stats, plan in zip(sessions, plans, strict=True):
        stats.rounds_to_replan -= 1
        controller.modes.add(stats)
        assert plan.is_off or plan.num_speculative_tokens > 0
    for stats in sessions:
        controller.prepare(stats, num_running)
    return plans


# Who speculates


def test_a_session_that_was_lucky_does_not_speculate_where_all_would_lose() -> None:
    controller = pair_controller(draft_step_s=0.012)
    lucky = accepting(controller, 0.95)
    others = [accepting(controller, 0.1) for _ in range(3)]
    for _ in range(2 * DECISION_STEPS):
        plans = step(controller, [lucky, *others])
    assert plans == [OFF] * 4
    # Alone it would go on.
    for _ in range(FIRST_DECISION_STEPS + 2):
        plans = step(controller, [lucky])
    assert not plans[0].is_off


def test_a_session_that_was_unlucky_goes_along_and_its_proposals_end_earlier() -> None:
    controller = pair_controller()
    unlucky = accepting(controller, 0.1)
    others = [accepting(controller, 0.9) for _ in range(3)]
    for _ in range(2 * DECISION_STEPS):
        plans = step(controller, [unlucky, *others])
    # All wait for the longest proposal: what is short for one saves nobody a step of the draft.
    assert plans == [Plan(2)] * 4
    assert controller.modes.plan == Plan(2)
    goodput_model = goodput_of(controller)
    own = [goodput_model.best(goodput_model.plans(one), one, 4) for one in (unlucky, others[0])]
    assert own[0].is_off and own[1].num_speculative_tokens > 2


def test_a_session_whose_draft_is_no_judge_has_no_more_tokens_than_are_worth_their_rows() -> None:
    controller = pair_controller()
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        for _ in range(20):
            controller.cost_model.target.add(rows, 0.020 + 0.0005 * rows, is_overlapped=False)
    unlucky, lucky = accepting(controller, 0.1), [accepting(controller, 0.9) for _ in range(3)]
    for stats in (unlucky, *lucky):
        stats.draft_knows_acceptance = False
    for _ in range(2 * DECISION_STEPS):
        plans = step(controller, [unlucky, *lucky])
    assert plans == [Plan(1), Plan(3), Plan(3), Plan(3)]


def test_all_turn_in_the_same_step_whenever_their_own_replans_are_due() -> None:
    controller = pair_controller(draft_step_s=0.012)
    sessions = [accepting(controller, 0.1) for _ in range(4)]
    for _ in range(3):
        step(controller, sessions)
    for index, stats in enumerate(sessions):
        stats.rounds_to_replan = 50 + index
        stats.acceptance = Rate(0.97)
    turned = [sum(not plan.is_off for plan in step(controller, sessions)) for _ in range(2 * DECISION_STEPS)]
    assert set(turned) == {0, 4}
    assert turned == sorted(turned)


def test_sessions_with_a_k_of_their_own_take_no_part() -> None:
    controller = pair_controller(draft_step_s=0.012)
    own = controller.start_session(request(speculation=SpeculationParams(num_speculative_tokens=4)))
    without = controller.start_session(request(speculation=SpeculationParams(enabled=False)))
    poor = accepting(controller, 0.1)
    for stats in (own, without):
        for _ in range(40):
            controller.observe_round(stats, 4, 4)
    for _ in range(20):
        plans = [controller.plan(one, num_remaining=100, num_running=3) for one in (own, without, poor)]
        for one in (own, without, poor):
            controller.observe_round(one, 0, 0)
    assert [plan.num_speculative_tokens for plan in plans] == [4, 0, 0]


def test_sessions_without_a_draft_are_forgotten_at_once() -> None:
    controller = pair_controller()
    for _ in range(10):
        stats = controller.start_session(request())
        for _ in range(100):
            controller.observe_round(stats, 0, 0)
            controller.prepare(stats, 1)
    assert not controller.modes._sessions
    planned = controller.start_session(request())
    controller.plan(planned, num_remaining=100, num_running=1)
    controller.observe_round(planned, 0, 0)
    assert list(controller.modes._sessions.values()) == [planned]


def test_all_take_up_a_new_plan_with_their_next_round() -> None:
    controller = pair_controller()
    sessions = [accepting(controller, 0.6) for _ in range(4)]
    for _ in range(2 * DECISION_STEPS):
        plans = step(controller, sessions)
    before = plans[0].num_speculative_tokens
    for index, stats in enumerate(sessions):
        stats.rounds_to_replan = 50 + index
    controller.modes.set_plan(Plan(before + 1))
    assert [plan.num_speculative_tokens for plan in step(controller, sessions)] == [before + 1] * 4
    # The same plan again is none to look at.
    num_changes = controller.modes.num_changes
    controller.modes.set_plan(Plan(before + 1))
    assert controller.modes.num_changes == num_changes


# What all do


@pytest.mark.parametrize(("promised_of_two", "k"), [(97.1, 2), (97.0, 3)])
def test_of_two_plans_that_promise_nearly_the_same_all_take_the_shorter(
    promised_of_two: float, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted_speedup = {2: promised_of_two, 3: 100.0, 4: 99.0}

    def goodput(self: GoodputModel, k: int, rounds: Sequence[ExpectedRound], num_running: int) -> float:
        return predicted_speedup.get(k, 50.0)

    monkeypatch.setattr(GoodputModel, "serial_goodput", goodput)
    controller = pair_controller()
    sessions = [controller.start_session(request()) for _ in range(2)]
    assert goodput_of(controller).best_for_all(sessions, 2, None) == Plan(k)
    # A longer one that all are under is left only where it promises too little.
    assert goodput_of(controller).best_for_all(sessions, 2, Plan(4)) == Plan(4)


def test_a_plan_that_gives_two_sessions_as_much_goes_before_one_that_gives_more_to_one() -> None:
    """4 and 4 tokens rather than 1 and 8, which are more together: the other is there for longer."""
    model = goodput_of(pair_controller())
    seconds = 0.020 + 4 * 0.004 + 2 * HANDLING_S
    even, uneven = (
        model.serial_goodput(4, [ExpectedRound(4.0, tokens, 1.0) for tokens in pair], 2)
        for pair in ((4.0, 4.0), (1.0, 8.0))
    )
    assert even == pytest.approx(4 / seconds)
    assert uneven == pytest.approx(8**0.5 / seconds)


# When it is decided


def test_taken_up_for_more_than_it_is_kept_for() -> None:
    assert KEEP_SPEEDUP < MIN_SPEEDUP
    between = (KEEP_SPEEDUP + MIN_SPEEDUP) / 2
    modes = ModeController()
    states = []
    for gain in (between, MIN_SPEEDUP, between, KEEP_SPEEDUP - 0.001, between):
        modes.decide(gain, 1)
        states.append((modes.uses_model, modes.num_changes, modes.calibrated_speedup))
    assert states == [
        (False, 1, between),
        (True, 2, MIN_SPEEDUP),
        (True, 2, between),
        (False, 3, KEEP_SPEEDUP - 0.001),
        (False, 3, between),
    ]


def test_decided_anew_after_some_steps_of_all_or_when_half_or_twice_as_many_run() -> None:
    modes = ModeController()
    assert modes.is_due(8)
    modes.decide(2.0, 8)
    assert [n for n in range(1, 33) if not modes.is_due(n)] == list(range(5, 16))
    stats = accepting(pair_controller(), 0.5)
    lengths = []
    for gain in (2.0, 2.0, 2.0, 0.5, 0.5):
        num_rounds = 0
        while not modes.is_due(8):
            modes.add(stats)
            num_rounds += 1
        modes.take_mean(stats)
        assert not modes.is_due(8)
        modes.decide(gain, 8)
        lengths.append(num_rounds / 8)
    # One that turned, the first of all too, is looked at again sooner.
    assert lengths == [FIRST_DECISION_STEPS, 8, DECISION_STEPS, DECISION_STEPS, FIRST_DECISION_STEPS]


def test_mean_is_of_those_that_had_a_round_since_and_else_of_the_last() -> None:
    modes = ModeController()
    new, poor, rich = (
        SessionStats(Rate(value), Rate(0.5), BoundedProposalStats(Rate(8.0), Rate(4.0)))
        for value in (0.1, 0.3, 0.7)
    )
    assert modes.take_mean(new) is new
    for stats in (poor, rich, rich):
        modes.add(stats)
    assert modes.take_mean(new).acceptance.value == pytest.approx(0.5)
    assert modes.take_mean(new).acceptance.value == pytest.approx(0.5)
    modes.add(rich)
    assert modes.take_mean(new).acceptance.value == pytest.approx(0.7)


def test_mean_session_is_as_all_are_on_average() -> None:
    judge = SessionStats(
        Rate(0.2), Rate(0.4), BoundedProposalStats(Rate(6.0), Rate(2.0)), draft_knows_acceptance=True
    )
    other = SessionStats(
        Rate(0.8), Rate(0.6), BoundedProposalStats(Rate(10.0), Rate(8.0)), draft_knows_acceptance=False
    )
    mean = mean_of([judge, other])
    values = (mean.acceptance, mean.continuation, mean.bounded.num_drafts, mean.bounded.num_accepted)
    assert [value.value for value in values] == pytest.approx([0.5, 0.5, 8.0, 5.0])
    assert [mean_of(some).draft_knows_acceptance for some in ([judge, other], [judge, judge, other])] == [
        False,
        True,
    ]


def test_without_speculation_replans_become_rare_but_not_deaf() -> None:
    controller = pair_controller(draft_step_s=0.030)
    stats = accepting(controller, 0.1)
    lengths = []
    for _ in range(6):
        stats.rounds_to_replan = 0
        assert controller.plan(stats, num_remaining=100, num_running=2).is_off
        lengths.append(stats.rounds_to_replan)
    assert lengths == [4, 8, 16, 32, OFF_REPLAN_ROUNDS, OFF_REPLAN_ROUNDS]


# What is left pays for what the draft must read


@pytest.mark.parametrize(("num_remaining", "is_off"), [(20, True), (21, False)])
def test_reading_is_paid_for_by_what_all_expect_of_speculation(num_remaining: int, is_off: bool) -> None:
    controller = pair_controller()
    controller.cost_model.draft.expect({1: 0.004, 224: 0.1})
    stats = accepting(controller, 0.5)
    controller.modes.decide(4 / 3, 2)
    stats.plan, stats.num_changes = OFF, controller.modes.num_changes
    # Each remaining token takes 20 ms without speculation, of which a quarter would be saved: 0.1 / 0.005.
    plan = controller.plan(stats, num_remaining=num_remaining, num_running=2, num_unread=224)
    assert plan.is_off is is_off


# Drafts at no cost


def row_policy(row_s: float) -> Controller:
    controller = Controller(speculation_config())
    for rows in range(1, 65):
        for _ in range(5):
            controller.cost_model.target.add(rows, 0.020 + row_s * rows, is_overlapped=False)
    return controller


def test_drafts_at_no_cost_are_each_sessions_own_affair() -> None:
    local = row_policy(0.001).length_of("fallback", prior_acceptance=0.3)
    poor, rich = accepting(local, 0.01), accepting(local, 0.9)
    for _ in range(2 * DECISION_STEPS):
        plans = [local.plan(stats, num_remaining=100, num_running=2) for stats in (poor, rich)]
        for stats in (poor, rich):
            stats.rounds_to_replan = 0
    assert plans[0].is_off and not plans[1].is_off


@pytest.mark.parametrize("num_running", [1, 4])
def test_a_draft_at_no_cost_adds_its_tokens_and_costs_the_others_its_rows(num_running: int) -> None:
    controller = row_policy(0.001)
    local = controller.length_of("fallback", prior_acceptance=0.5)
    stats = local.start_session(request())
    before, after = 0.020 + 0.001 * num_running, 0.020 + 0.001 * (num_running + 2)
    expected = (num_running - 1 + 1 + 0.5 + 0.25) / after - (num_running - 1) / before
    assert local.goodput(Plan(2), stats, num_running) == pytest.approx(expected)
    assert local.goodput(OFF, stats, num_running) == pytest.approx(1 / before)


def test_a_row_that_costs_more_than_it_brings_is_not_drafted_beside_others() -> None:
    local = row_policy(0.004).length_of("fallback", prior_acceptance=0.5)
    ks = [
        local.plan(
            local.start_session(request()), num_remaining=100, num_running=count
        ).num_speculative_tokens
        for count in (1, 16)
    ]
    # A row takes 4 ms, or 4 / 24 of a step of one, 4 / 84 of a step of sixteen: there it delays sixteen.
    assert ks[0] > 0 and ks[1] == 0


def test_beside_many_others_a_draft_token_is_refused_that_costs_nothing_by_the_table() -> None:
    """Of 33 each would lose as much as a thirtieth of a step, were the table wrong by so little."""
    local = row_policy(0.0).length_of("fallback", prior_acceptance=0.5)
    stats = local.start_session(request())
    assert local.goodput(Plan(1), stats, 33) == pytest.approx((32 + 1.5) / 0.0208 - 32 / 0.020)
    assert local.goodput(Plan(1), stats, 33) < 0.25 * local.goodput(OFF, stats, 33)
    ks = [
        local.plan(
            local.start_session(request()), num_remaining=100, num_running=count
        ).num_speculative_tokens
        for count in (1, 33)
    ]
    assert ks[0] > 0 and ks[1] == 0
