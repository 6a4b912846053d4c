"""What is chosen when: modes, K, fan-out, and when to leave speculation off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specray.control.controller import Policy
from specray.control.cost_model import HANDLING_S, Measured
from specray.control.draft_times import DraftTimes
from specray.control.estimators import Average, OutcomesTime, Rate, TimeTable, chain_trials
from specray.control.expected import Round, expected_drafts, expected_steps, expected_tokens, prior_hit_rate
from specray.control.mode import MIN_GAIN
from specray.control.probes import PROBE_INTERVAL_ROUNDS, PROBE_ROUNDS
from specray.control.prospects import (
    ANY_K,
    AUTO_K,
    LONGER_GAIN,
    MANY_SESSIONS,
    MAX_SHARED_K,
    WIDTHS,
    max_branches,
)
from specray.control.state import OFF, OFF_REVIEW_ROUNDS, Pacing, Plan
from specray.requests import SpeculationParams
from specray.router.session_values import Lookup
from specray.types import Overlap, StepTime, Verification
from tests.unit.router.harness import request, speculation_config


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
) -> tuple[Policy, Pacing]:
    """A policy and a session that have seen a pair of this speed and agreement."""
    policy = Policy(speculation_config(**config))
    pacing = policy.pace(request())
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        for is_overlapped in (False, True):
            policy.measured.target.add(rows, verify_s + rows_s * rows, is_overlapped=is_overlapped)
    for _ in range(10):
        policy.measured.observe_proposals([4], 4 * draft_step_s, 0.0002)
        # A branch costs a twentieth of a step: 8 branches of 4 tokens 1.6 steps, besides 5.
        policy.measured.observe_outcomes(4, 8, 6.6 * draft_step_s)
    for index in range(200):
        for width in WIDTHS:
            lookup = Lookup.HIT if index * 37 % 100 < 100 * hits else Lookup.MISS_TOKEN
            policy.observe_lookup(Plan(4, Overlap.ENUMERATE, width), lookup)
        passed = index * 37 % 100 < 100 * acceptance
        policy.observe_round(pacing, 1, int(passed))
    pacing.plan = None
    pacing.rounds_to_review = 0
    return policy, pacing


def chosen(policy: Policy, pacing: Pacing, *, num_remaining: int = 100, num_running: int = 1) -> Plan:
    return policy.plan(pacing, num_remaining=num_remaining, num_running=num_running)


# Fixed by configuration or request


@pytest.mark.parametrize("overlap", [Overlap.SERIAL, Overlap.AHEAD, Overlap.ENUMERATE])
def test_configured_mode_and_k_stand(overlap: Overlap) -> None:
    policy, pacing = measured(overlap=overlap, num_speculative_tokens=5)
    assert chosen(policy, pacing) == Plan(5, overlap)


def test_k_stays_below_what_remains() -> None:
    policy, pacing = measured(overlap="serial", num_speculative_tokens=5)
    assert chosen(policy, pacing, num_remaining=4).num_speculative_tokens == 3
    assert chosen(policy, pacing, num_remaining=1) == OFF


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
    policy = Policy(speculation_config(num_speculative_tokens=5))
    pacing = policy.pace(request(speculation=wanted))
    assert chosen(policy, pacing).num_speculative_tokens == k


def test_draft_that_refused_is_left_alone_for_some_rounds() -> None:
    policy, pacing = measured(num_speculative_tokens=3)
    pacing.rest_rounds = 2
    for expected in (0, 0, 3):
        assert chosen(policy, pacing).num_speculative_tokens == expected
        policy.observe_round(pacing, 0, 0)


# Fan-out


def test_fanout_of_each_mode() -> None:
    policy, _ = measured(acceptance=0.58)
    for plan, fanout, most in (
        (Plan(3, Overlap.SERIAL), (), 0),
        (Plan(3, Overlap.AHEAD), (0, 0, 0, 1), 0),
        (Plan(3, Overlap.ENUMERATE, 3), (8, 8, 8, 8), 12),
        (Plan(3, Overlap.ENUMERATE, 1), (8, 8, 8, 8), 4),
        (OFF, (), 0),
    ):
        assert policy.fanout(plan, 3) == fanout
        assert max_branches(plan, 3, num_running=1) == most


def test_fanout_of_a_round_without_draft_tokens_foresees_the_next_token() -> None:
    policy, _ = measured()
    assert policy.fanout(Plan(3, Overlap.AHEAD), 0) == (1,)
    plan = Plan(3, Overlap.ENUMERATE, 3)
    assert (policy.fanout(plan, 0), max_branches(plan, 0, num_running=1)) == ((8,), 3)


def test_long_filler_gets_no_more_branches_than_the_drafts_own_proposals() -> None:
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
        policy, pacing = measured(acceptance=acceptance, overlap="serial")
        ks.append(chosen(policy, pacing).num_speculative_tokens)
    assert ks == sorted(ks) and ks[0] < ks[2]


def test_serial_k_is_the_optimum_of_the_formula() -> None:
    policy, pacing = measured(acceptance=0.6, overlap="serial", draft_step_s=0.004)
    for _ in range(1000):
        policy.observe_proposed(pacing, 8, 8)
    acceptance = pacing.acceptance.value

    def goodput(k: int) -> float:
        return (1 - acceptance ** (k + 1)) / (1 - acceptance) / (0.020 + 0.004 * k + 0.0002)

    assert chosen(policy, pacing).num_speculative_tokens == max(AUTO_K, key=goodput)


def test_rounds_under_a_bound_are_sums_over_the_tokens_that_come() -> None:
    # 1, then half of the times another, then half of those times a third.
    assert expected_drafts(3, 0.5) == pytest.approx(1 + 0.5 + 0.25)
    assert expected_drafts(3, 1.0) == 3
    assert expected_tokens(0.8, 3, 0.5) == pytest.approx(1 + 0.8 + 0.5 * 0.8**2 + 0.25 * 0.8**3)
    assert expected_tokens(0.8, 3) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)


def test_a_draft_that_ends_its_proposals_early_is_expected_to_do_so() -> None:
    policy, pacing = measured(overlap="serial")
    for _ in range(200):
        policy.observe_proposed(pacing, 8, 2)
    # One continuation and one end for each proposal; some of what was believed before is left.
    goes_on = pacing.continuation.value
    assert goes_on == pytest.approx(0.5, abs=0.02)
    expected = expected_tokens(pacing.acceptance.value, 8, goes_on)
    drafted_s = 0.004 * (expected_drafts(8, goes_on) + 1 - goes_on**7)
    goodput = policy.goodput(Plan(8), pacing, 1)
    assert goodput == pytest.approx(expected / (0.020 + drafted_s + 0.0002), rel=0.01)


def test_a_draft_token_must_promise_what_its_row_and_its_step_could_bring() -> None:
    policy, pacing = measured(overlap="serial", rows_s=0.0005, draft_step_s=0.001)
    for num_running in (1, 4):
        pacing.rounds_to_review = 0
        plan = chosen(policy, pacing, num_running=num_running)
        rate = num_running * policy.goodput(plan, pacing, num_running)
        # Of four proposals others are as long as one that ends a token earlier: its step is taken for them.
        assert plan.min_acceptance == pytest.approx(rate * (0.0005 + 0.001 / num_running**2), rel=0.05)


def test_a_draft_token_of_many_costs_its_part_of_a_step_that_is_taken_anyway() -> None:
    policy = Policy(speculation_config(overlap="serial"))
    policy.measured.expect_draft(times((1, 0.001), (32, 0.0041)), 0.0)
    line_s = policy._prospects._line_s
    assert line_s(1, 0.020) == pytest.approx(0.001)
    assert line_s(32, 0.020) == pytest.approx(0.0001 + 0.0009 / 32**2)


def test_rows_of_many_sessions_cost_what_they_do_beyond_the_first_half() -> None:
    """The first 16 draft rows take 20 ms, the next 16 take 4; nobody leaves out the first ones."""
    policy = Policy(speculation_config(overlap="serial"))
    for rows, seconds in ((8, 0.020), (24, 0.040), (40, 0.044)):
        for _ in range(3):
            policy.measured.target.add(rows, seconds, is_overlapped=False)
    policy.measured.expect_draft(times((1, 1e-9)), 0.0)
    pacing = policy.pace(request())
    pacing.continuation = Rate(1.0)
    rate = policy.goodput(Plan(4), pacing, 8)
    assert policy._prospects._worth(Plan(4), pacing, 8) == pytest.approx(8 * rate * 0.004 / 16, rel=1e-3)


def judge(policy: Policy, pacing: Pacing, num_asked: int, num_drafts: int, num_accepted: int) -> None:
    """One round with a proposal under a bound."""
    policy.observe_proposed(pacing, num_asked, num_drafts)
    policy.observe_round(pacing, num_drafts, num_accepted)


def test_proposals_of_any_length_are_worth_what_they_came_to() -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.95, draft_step_s=0.001)
    for _ in range(400):
        judge(policy, pacing, ANY_K, 10, 10)
    plan = chosen(policy, pacing)
    assert plan == Plan(ANY_K)
    # Some of what was believed before is left. One more is drafted, before which the proposal ends.
    drafts, accepted = pacing.judged.num_drafts.value, pacing.judged.num_accepted.value
    assert (drafts, accepted) == pytest.approx((9.85, 9.56), abs=0.01)
    drafted_s = 0.001 * num_steps(ANY_K, [1 - 1 / drafts], 1)
    assert 0.0103 < drafted_s < 0.0109
    assert policy.goodput(plan, pacing, 1) == pytest.approx(
        (1 + accepted) / (0.0202 + drafted_s + HANDLING_S)
    )


def test_the_router_takes_its_time_for_what_a_miss_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, pacing = measured(overlap="enumerate", hits=0.75)
    plan = Plan(4, Overlap.ENUMERATE, 1)
    policy.measured.hit_rate[1] = Rate(0.75)
    before = 1 / policy.goodput(plan, pacing, 8)
    monkeypatch.setattr("specray.control.cost_model.HANDLING_S", HANDLING_S + 0.001)
    more_s = 0.25 * 8 * 0.001
    assert 1 / policy.goodput(plan, pacing, 8) - before == pytest.approx(
        more_s / expected_tokens(pacing.acceptance.value, 4)
    )


def test_proposals_of_any_length_are_left_when_little_of_them_is_accepted() -> None:
    policy, pacing = measured(overlap="serial", rows_s=0.0005, draft_step_s=0.001)
    for _ in range(400):
        judge(policy, pacing, ANY_K, 30, 2)
    assert 0 < chosen(policy, pacing).num_speculative_tokens < 8


def test_nobody_accepts_more_than_acceptance_allows_of_however_many() -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.6)
    acceptance = pacing.acceptance.value
    assert pacing.judged.num_accepted.value == 4.0
    assert policy.goodput(Plan(ANY_K), pacing, 1) == pytest.approx(
        (1 + acceptance / (1 - acceptance)) / (0.020 + 9 * 0.004 + 0.0002), rel=0.02
    )


def test_only_rounds_whose_proposal_could_have_any_length_tell_of_such_ones() -> None:
    policy, pacing = measured(overlap="serial")
    for _ in range(50):
        judge(policy, pacing, 8, 8, 8)
        # Outcomes, fillers and proposals without a bound.
        policy.observe_round(pacing, 3, 3)
    assert (pacing.judged.num_drafts.value, pacing.judged.num_accepted.value) == (8.0, 4.0)
    judge(policy, pacing, ANY_K, 13, 9)
    policy.observe_round(pacing, 3, 3)
    assert pacing.judged.num_drafts.value == pytest.approx((4 * 8.0 + 13) / 5)
    assert pacing.judged.num_accepted.value == pytest.approx((4 * 4.0 + 9) / 5)
    new = policy.pace(request())
    assert new.judged.num_drafts.value == pytest.approx((4 * 8.0 + 13) / 5)


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
    measured_times = Measured()
    for rows in (4, 8, 16, 64):
        for _ in range(3):
            measured_times.target.add(rows, 0.010 + 0.001 * rows)
    measured_times.draft.expect({1: 0.001, 4: 0.002})
    rounds = [Round(4.0, 5.0, 1.0), *(Round(0.0, 1.0, 0.0) for _ in range(3))]
    # Each begins with the two tokens that a round commits on average: as six proposals, by half a row each.
    read_s = (6 - 4) / 3 * 0.001
    tokens, seconds = 5 ** (1 / 4), 0.018 + 2 * 0.002 + 2 * 0.001 + read_s + 4 * HANDLING_S
    assert measured_times.serial_goodput(4, rounds, 4) == pytest.approx(tokens / seconds)
    # And what four proposals take beside their steps: twice what one does.
    measured_times.draft._overhead = 0.5
    assert measured_times.serial_goodput(4, rounds, 4) == pytest.approx(tokens / (seconds + 2 * 0.0005))


def test_a_plan_for_all_is_not_as_long_as_the_surest_session_would_like() -> None:
    policy, _ = measured(verify_s=0.020, draft_step_s=0.002, overlap="serial")
    sure, others = policy.pace(request()), [policy.pace(request()) for _ in range(7)]
    for pacing, rate in ((sure, 0.97), *((other, 0.5) for other in others)):
        pacing.acceptance, pacing.continuation = Rate(rate), Rate(rate)
    prospects = policy._prospects
    alone = prospects.best(prospects.plans(sure), sure, 8)
    joint = prospects.best_for_all([sure, *others], 8, None)
    assert joint.num_speculative_tokens < alone.num_speculative_tokens
    # Sure sessions have what they like, but for a step or two that bring next to nothing.
    surest = prospects.best_for_all([sure], MANY_SESSIONS - 1, None)
    alone = prospects.best(prospects.plans(sure), sure, MANY_SESSIONS - 1)
    most, least = (policy.goodput(plan, sure, MANY_SESSIONS - 1) for plan in (alone, surest))
    assert alone.num_speculative_tokens > MAX_SHARED_K and LONGER_GAIN * least >= most
    # Many never wait for longer ones, whatever these promise.
    for count, longest in ((MANY_SESSIONS - 1, 10), (MANY_SESSIONS, MAX_SHARED_K), (32, MAX_SHARED_K)):
        assert prospects.best_for_all([sure], count, None).num_speculative_tokens == longest
    # What all do is kept while another plan promises little more.
    near = next(k for k in reversed(AUTO_K) if k < joint.num_speculative_tokens)
    assert prospects.best_for_all([sure, *others], 8, Plan(near)) == Plan(near)


def test_what_a_proposal_takes_whatever_its_length_is_no_part_of_its_steps() -> None:
    """2 ms a step, and 3 ms beside, of eight sequences: steps that were expected stay what they are."""
    measured_times = Measured()
    measured_times.draft.expect({1: 0.002, 8: 0.002})
    for index in range(300):
        num_steps = (1, 2, 7)[index % 3]
        measured_times.observe_proposals([num_steps] * 8, 0.003 + 0.002 * num_steps, 0.0)
    assert measured_times.draft.overhead_s(8) == pytest.approx(0.003, rel=0.05)
    assert measured_times.draft_step_s(8, 1.0) == pytest.approx(0.002, rel=0.05)
    # A draft that is as fast as was believed has none.
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
    assert times.reading_s(1, 63) == pytest.approx(0.001, rel=0.01)
    assert times.reading_s(1, 1) == 0.0


def test_what_one_proposal_takes_besides_is_not_believed_of_each_of_many() -> None:
    times = DraftTimes()
    times.expect({1: 0.001, 64: 0.002})
    for index in range(200):
        num_steps = 1 + index % 3
        times.add([num_steps], 0.0003 + 0.001 * num_steps)
    assert times.overhead_s(1) == pytest.approx(0.0003, rel=0.1)
    assert times.overhead_s(64) == pytest.approx(8 * 0.0003, rel=0.1)


def test_rows_that_the_weights_hide_cost_nothing_in_the_bound() -> None:
    policy = Policy(speculation_config(overlap="serial"))
    pacing = policy.pace(request())
    for rows, seconds in ((1, 0.020), (9, 0.020), (18, 0.040), (64, 0.150)):
        policy.measured.target.add(rows, seconds, is_overlapped=False)
    for _ in range(10):
        policy.measured.observe_proposals([4], 4 * 0.001, 0.0)
    plan = chosen(policy, pacing)
    # 8 draft tokens are believed: rows 2 to 9.
    assert plan == Plan(ANY_K)
    assert plan.min_acceptance == pytest.approx(0.001 * policy.goodput(plan, pacing, 1), abs=0.001)


def test_what_proposals_of_any_length_once_came_to_is_doubted_while_others_are_chosen() -> None:
    policy, pacing = measured(overlap="serial", rows_s=0.0005, draft_step_s=0.001)
    for _ in range(50):
        judge(policy, pacing, ANY_K, 30, 2)
    before = pacing.judged.num_drafts.value
    for _ in range(40):
        pacing.rounds_to_review = 0
        assert chosen(policy, pacing).num_speculative_tokens < ANY_K
        assert pacing.judged.num_drafts.value <= before
    assert 8.0 < pacing.judged.num_drafts.value < before - 4


def test_draft_tokens_drawn_for_rejection_are_not_judged() -> None:
    policy, _ = measured(overlap="serial", rows_s=0.0005)
    rejection = policy.pace(request(temperature=1.0, verification=Verification.REJECTION))
    plan = chosen(policy, rejection)
    assert 0 < plan.num_speculative_tokens < ANY_K and plan.min_acceptance == 0.0
    greedy = policy.pace(request(temperature=0.0, verification=Verification.REJECTION))
    assert chosen(policy, greedy).min_acceptance > 0.0


@pytest.mark.parametrize(
    "config", [{"overlap": "enumerate"}, {"overlap": "serial", "num_speculative_tokens": 4}]
)
def test_a_k_that_was_asked_for_and_outcomes_have_no_bound(config: dict[str, Any]) -> None:
    policy, pacing = measured(rows_s=0.0005, **config)
    plan = chosen(policy, pacing)
    assert not plan.is_off and plan.min_acceptance == 0.0


def test_drafts_without_a_model_have_no_bound() -> None:
    policy, _ = measured(overlap="serial", rows_s=0.0005)
    local = policy.beside("ngram", prior_acceptance=0.9)
    plan = chosen(local, local.pace(request()))
    assert not plan.is_off and plan.min_acceptance == 0.0


def test_enumeration_is_chosen_where_it_hides_the_draft() -> None:
    policy, pacing = measured(overlap="auto", draft_step_s=0.002, hits=0.9)
    assert chosen(policy, pacing).overlap is Overlap.ENUMERATE


def test_overlap_is_not_chosen_where_it_slows_the_target_more_than_it_hides() -> None:
    policy, pacing = measured(overlap="auto", draft_step_s=0.002)
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(60):
            policy.measured.target.add(rows, 0.035, is_overlapped=True)
    assert chosen(policy, pacing).overlap is Overlap.SERIAL


def test_overlap_that_was_never_tried_must_promise_to_hide_more_than_a_little() -> None:
    chosen_ways = []
    for draft_step_s in (0.0003, 0.002):
        policy = Policy(speculation_config(overlap="auto", num_speculative_tokens=4))
        pacing = policy.pace(request())
        for rows in (1, 4, 5, 8):
            policy.measured.target.add(rows, 0.020, is_overlapped=False)
        for _ in range(10):
            policy.measured.observe_proposals([4], 4 * draft_step_s, 0.0005)
        chosen_ways.append(chosen(policy, pacing).overlap)
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
    policy, pacing = measured(**pair)
    assert chosen(policy, pacing) == OFF


def test_large_batches_switch_speculation_off() -> None:
    policy, pacing = measured(verify_s=0.018, rows_s=0.002, overlap="serial", acceptance=0.7)
    assert not chosen(policy, pacing, num_running=1).is_off
    pacing.plan, pacing.rounds_to_review = None, 0
    assert chosen(policy, pacing, num_running=64).is_off


def test_plan_is_kept_while_another_promises_little_more() -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.6)
    best = chosen(policy, pacing)
    near = next(
        Plan(k)
        for k in AUTO_K
        if k != best.num_speculative_tokens
        and policy.goodput(best, pacing, 1) < 1.05 * policy.goodput(Plan(k), pacing, 1)
    )
    pacing.plan, pacing.rounds_to_review = near, 0
    assert chosen(policy, pacing) == near
    pacing.plan, pacing.rounds_to_review = Plan(16), 0
    assert chosen(policy, pacing) == best


def test_probes_are_rare_and_short_while_speculation_is_off() -> None:
    policy, pacing = measured(hits=0.0, acceptance=0.02)
    probes = 0
    for _ in range(4 * PROBE_INTERVAL_ROUNDS):
        plan = chosen(policy, pacing)
        probes += not plan.is_off
        policy.observe_round(pacing, plan.num_speculative_tokens, 0)
    assert 2 * PROBE_ROUNDS <= probes <= 4 * PROBE_ROUNDS


def test_of_many_sessions_without_speculation_one_tries_for_all() -> None:
    policy, _ = measured(hits=0.0, acceptance=0.02)
    sessions = [policy.pace(request()) for _ in range(8)]
    num_probes, widest = 0, 0
    for step in range(5 * PROBE_INTERVAL_ROUNDS):
        plans = [chosen(policy, pacing, num_running=8) for pacing in sessions]
        for pacing, plan in zip(sessions, plans, strict=True):
            policy.observe_round(pacing, plan.num_speculative_tokens, 0)
        if step >= PROBE_INTERVAL_ROUNDS:
            num_probes += sum(not plan.is_off for plan in plans)
            widest = max(widest, sum(not plan.is_off for plan in plans))
    assert widest == 1
    assert 2 * PROBE_ROUNDS <= num_probes <= 4 * PROBE_ROUNDS


def reading_policy(read_s: float) -> tuple[Policy, Pacing]:
    """Speculation pays, has been off, and the draft would have to read 224 tokens first."""
    policy, pacing = measured(overlap="serial", acceptance=0.7)
    policy.measured.draft.expect({1: 0.004, 224: read_s})
    pacing.plan = Plan(0)
    return policy, pacing


@pytest.mark.parametrize(("num_remaining", "is_off"), [(8, True), (9, False)])
def test_speculation_is_taken_up_only_where_what_is_left_pays_for_what_the_draft_must_read(
    num_remaining: int, is_off: bool
) -> None:
    policy, pacing = reading_policy(0.05)
    best = chosen(policy, policy.pace(request()))
    saved_s = 1 / policy.goodput(Plan(0), pacing, 1) - 1 / policy.goodput(best, pacing, 1)
    read_s = 8.5 * saved_s
    policy, pacing = reading_policy(read_s)
    plan = policy.plan(pacing, num_remaining=num_remaining, num_running=1, num_unread=224)
    assert plan.is_off is is_off


def test_what_the_draft_has_been_told_costs_nothing_to_take_up_again() -> None:
    policy, pacing = reading_policy(10.0)
    assert not policy.plan(pacing, num_remaining=8, num_running=1, num_unread=33).is_off
    pacing.plan, pacing.rounds_to_review = Plan(0), 0
    assert policy.plan(pacing, num_remaining=8, num_running=1, num_unread=34).is_off


@pytest.mark.parametrize(("read_s", "interval"), [(0.02, 256), (0.08, 800)])
def test_a_try_is_as_rare_as_what_the_draft_must_read_for_it_is_long(read_s: float, interval: int) -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.02)
    policy.measured.draft.expect({1: 0.004, 224: read_s})
    tries = []
    for step in range(2500):
        plan = policy.plan(pacing, num_remaining=1000, num_running=1, num_unread=224)
        if not plan.is_off:
            tries.append(step)
        policy.observe_round(pacing, plan.num_speculative_tokens, 0)
    first, *others = tries
    distances = {later - first for later in others if later - first > PROBE_ROUNDS}
    assert interval <= min(distances) <= interval + 40


def test_beside_others_that_speculate_a_session_tries_for_itself() -> None:
    policy, busy = measured(hits=0.0, acceptance=0.02)
    alone = policy.pace(request())
    tried = 0
    for _ in range(2 * (PROBE_INTERVAL_ROUNDS + OFF_REVIEW_ROUNDS)):
        plan = chosen(policy, alone, num_running=2)
        tried += not plan.is_off
        policy.observe_round(alone, plan.num_speculative_tokens, 0)
        policy.observe_round(busy, 1, 0)
    assert tried == 2 * PROBE_ROUNDS


def slowed(policy: Policy) -> None:
    """The machine takes twice as long from now on; of the target's steps those of one row say so."""
    for _ in range(60):
        policy.measured.target.add(1, 0.040, is_overlapped=False)


def test_a_slow_machine_slows_all_ways_of_working_alike() -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.7)
    for _ in range(60):
        policy.measured.observe_proposals([4], 0.016, 0.010)
        policy.measured.target.add(1, 0.020, is_overlapped=False)
    plans = (Plan(0), Plan(1), Plan(4))
    before = [policy.goodput(plan, pacing, 1) for plan in plans]
    patience_s = policy.patience_s()
    slowed(policy)
    shares = [policy.goodput(plan, pacing, 1) / fast for plan, fast in zip(plans, before, strict=True)]
    assert shares[0] == pytest.approx(0.5, rel=0.02)
    assert shares[1:] == pytest.approx(2 * shares[:1], rel=0.1)
    assert patience_s is not None and (policy.patience_s() or 0.0) > 1.5 * patience_s


def test_what_the_draft_took_on_a_slow_machine_is_not_what_it_takes_on_a_fast_one() -> None:
    slow, pacing = measured(overlap="serial", acceptance=0.7)
    fast, _ = measured(overlap="serial", acceptance=0.7)
    for _ in range(60):
        slow.measured.target.add(1, 0.020, is_overlapped=False)
    slowed(slow)
    for policy, seconds in ((slow, 0.008), (fast, 0.004)):
        for _ in range(60):
            policy.measured.observe_proposals([4], 4 * seconds, seconds)
    for _ in range(60):
        slow.measured.target.add(1, 0.020, is_overlapped=False)
    assert slow.goodput(Plan(4), pacing, 1) == pytest.approx(fast.goodput(Plan(4), pacing, 1), rel=0.1)


@pytest.mark.parametrize(("draft_step_s", "is_off"), [(0.0090, False), (0.0098, True)])
def test_speculation_that_promises_a_little_more_than_none_is_not_taken_up(
    draft_step_s: float, is_off: bool
) -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.6, draft_step_s=draft_step_s)
    gains = [policy.goodput(Plan(k), pacing, 1) / policy.goodput(Plan(0), pacing, 1) for k in AUTO_K]
    assert max(gains) > 1.02
    assert (max(gains) < MIN_GAIN) is is_off
    pacing.plan = Plan(0)
    assert chosen(policy, pacing).is_off is is_off


def test_one_session_that_tries_does_not_make_the_others_try() -> None:
    policy, _ = measured(hits=0.0, acceptance=0.02)
    sessions = [policy.pace(request()) for _ in range(4)]
    for pacing in sessions:
        pacing.rounds_off = PROBE_INTERVAL_ROUNDS
    trying = sessions[0]
    trying.plan, trying.is_probing = Plan(4), True
    for _ in range(4 * PROBE_INTERVAL_ROUNDS):
        policy.observe_round(sessions[1], 0, 0)
    policy._probes.begin()
    policy.observe_round(trying, 4, 0)
    for pacing in sessions[1:]:
        pacing.plan, pacing.rounds_to_review = Plan(0), 0
        assert chosen(policy, pacing, num_running=4).is_off


def test_what_drafts_without_a_model_is_tried_by_each_session_and_reads_nothing() -> None:
    policy, _ = measured(hits=0.0, acceptance=0.02)
    local = policy.beside("filler", prior_acceptance=0.02)
    local.measured.draft.expect({1: 0.004, 224: 10.0})
    sessions = [local.pace(request()) for _ in range(4)]
    tried = 0
    for _ in range(PROBE_INTERVAL_ROUNDS + 32):
        for pacing in sessions:
            plan = local.plan(pacing, num_remaining=50, num_running=4, num_unread=224)
            tried += not plan.is_off
            local.observe_round(pacing, plan.num_speculative_tokens, 0)
    assert tried >= 4 * PROBE_ROUNDS
    assert local._reading_s(sessions[0]) == 0.0


def test_speculation_returns_when_a_probe_finds_agreement() -> None:
    policy, pacing = measured(hits=0.0, acceptance=0.02)
    for _ in range(12 * PROBE_INTERVAL_ROUNDS):
        k = chosen(policy, pacing).num_speculative_tokens
        policy.observe_round(pacing, k, k)
    assert not chosen(policy, pacing).is_off


def test_never_below_098_of_plain_decoding_with_a_draft_that_is_always_wrong() -> None:
    policy, pacing = measured(hits=0.0, acceptance=0.02, draft_step_s=0.004)
    seconds = tokens = 0.0
    for _ in range(2000):
        k = chosen(policy, pacing).num_speculative_tokens
        policy.observe_round(pacing, k, 0)
        seconds += 0.020 + 0.004 * k
        tokens += 1
    assert tokens / seconds > 0.98 / 0.020


def test_first_plan_before_any_measurement_speculates_moderately() -> None:
    policy = Policy(speculation_config(overlap="auto"))
    assert chosen(policy, policy.pace(request())) == Plan(3, Overlap.ENUMERATE)


def test_patience_is_unknown_before_the_first_proposal_and_follows_the_draft_after() -> None:
    assert Policy(speculation_config()).patience_s() is None
    policy, _ = measured(num_speculative_tokens=4, draft_step_s=0.010)
    assert policy.patience_s() == pytest.approx(4 * (6.6 * 0.010 + 0.0002))


def test_a_wider_fanout_is_chosen_while_it_still_hides_behind_the_target() -> None:
    chosen_widths = {}
    for draft_step_s in (0.001, 0.0028, 0.0033):
        policy, pacing = measured(draft_step_s=draft_step_s, overlap="enumerate", num_speculative_tokens=4)
        for width, hits in ((1, 55), (2, 75), (3, 84)):
            for index in range(400):
                lookup = Lookup.HIT if index * 37 % 100 < hits else Lookup.MISS_TOKEN
                policy.observe_lookup(Plan(4, Overlap.ENUMERATE, width), lookup)
        chosen_widths[draft_step_s] = chosen(policy, pacing).width
    assert chosen_widths == {0.001: 3, 0.0028: 2, 0.0033: 1}


def test_hits_before_any_lookup_are_those_of_a_trained_pair() -> None:
    assert [prior_hit_rate(width, 0.55) for width in (1, 2, 3)] == pytest.approx([0.55, 0.775, 0.865])


def test_a_review_that_was_prepared_is_not_repeated_by_the_next_plan() -> None:
    policy, pacing = measured(overlap="serial", acceptance=0.6)
    prepared = chosen(policy, pacing)
    pacing.rounds_to_review = 2
    policy.prepare(pacing, 1)
    assert pacing.rounds_to_review == 2
    pacing.rounds_to_review = 1
    policy.prepare(pacing, 1)
    assert pacing.rounds_to_review > 1
    left = pacing.rounds_to_review
    assert chosen(policy, pacing) == prepared
    assert pacing.rounds_to_review == left


def test_nothing_is_prepared_for_a_session_without_speculation() -> None:
    policy = Policy(speculation_config())
    pacing = policy.pace(request(speculation=SpeculationParams(enabled=False)))
    policy.prepare(pacing, 1)
    assert pacing.plan is None


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


def test_what_was_measured_once_is_doubted_review_by_review() -> None:
    """A way of working that was slow when it was tried is tried again one day."""
    policy, pacing = measured(overlap="auto", draft_step_s=0.002)
    assert chosen(policy, pacing).overlap is Overlap.ENUMERATE
    for _ in range(60):
        for num_branches in (1, 4, 8, 20, 40):
            policy.measured.observe_outcomes(3, num_branches, 0.080)
    ways = []
    for _ in range(100):
        pacing.rounds_to_review = 0
        ways.append(chosen(policy, pacing).overlap)
    assert ways[0] is not Overlap.ENUMERATE
    assert ways[-1] is Overlap.ENUMERATE


def test_many_sessions_doubt_no_faster_than_one() -> None:
    """What one round of reviews forgets does not depend on how many sessions have theirs in it."""
    left = []
    for num_running in (1, 32):
        times = OutcomesTime()
        times.add(3, 4, 0.080, step_s=0.002)
        before = times.predict(3, 4, step_s=0.002)
        policy, pacing = measured(overlap="auto")
        policy.measured.outcomes = times
        for _ in range(num_running):
            pacing.rounds_to_review = 0
            chosen(policy, pacing, num_running=num_running)
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
