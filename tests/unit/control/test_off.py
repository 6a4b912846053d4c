"""Speculation that is off: where it would lose, what a try costs, and when it is taken up again."""

from __future__ import annotations

from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.experiments import EXPLORATION_INTERVAL_ROUNDS, EXPLORATION_ROUNDS
from specray.control.goodput import AUTO_K
from specray.control.mode import MIN_SPEEDUP
from specray.control.state import OFF, OFF_REPLAN_ROUNDS, Plan, SessionStats
from tests.unit.control.harness import chosen, measured
from tests.unit.router.harness import request


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


def test_explorations_are_rare_and_short_while_speculation_is_off() -> None:
    controller, stats = measured(hits=0.0, acceptance=0.02)
    explorations = 0
    for _ in range(8 * EXPLORATION_INTERVAL_ROUNDS):
        plan = chosen(controller, stats, num_running=2)
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
    stats.plan, stats.rounds_off = Plan(0), 1
    return controller, stats


@pytest.mark.parametrize(("num_remaining", "is_off"), [(8, True), (9, False)])
def test_speculation_is_taken_up_only_where_what_is_left_pays_for_what_the_draft_must_read(
    num_remaining: int, is_off: bool
) -> None:
    controller, stats = unread_controller(0.05)
    best = chosen(controller, controller.start_session(request()), num_running=2)
    saved_s = 1 / controller.goodput(Plan(0), stats, 2) - 1 / controller.goodput(best, stats, 2)
    read_s = 8.5 * saved_s
    controller, stats = unread_controller(read_s)
    plan = controller.plan(stats, num_remaining=num_remaining, num_running=2, num_unread=224)
    assert plan.is_off is is_off


def test_what_the_draft_has_been_told_costs_nothing_to_take_up_again() -> None:
    controller, stats = unread_controller(10.0)
    assert not controller.plan(stats, num_remaining=8, num_running=1, num_unread=33).is_off
    stats.plan, stats.rounds_to_replan = Plan(0), 0
    assert controller.plan(stats, num_remaining=8, num_running=1, num_unread=34).is_off


@pytest.mark.parametrize(("read_s", "interval"), [(0.02, 512), (0.08, 1600)])
def test_a_try_is_as_rare_as_what_the_draft_must_read_for_it_is_long(read_s: float, interval: int) -> None:
    controller, stats = measured(overlap="serial", acceptance=0.02)
    controller.cost_model.draft.expect({1: 0.004, 224: read_s})
    tries = []
    for step in range(5000):
        plan = controller.plan(stats, num_remaining=1000, num_running=2, num_unread=224)
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


@pytest.mark.parametrize(("draft_step_s", "is_off"), [(0.0090, False), (0.0098, True)])
def test_speculation_that_promises_a_little_more_than_none_is_not_taken_up(
    draft_step_s: float, is_off: bool
) -> None:
    controller, stats = measured(overlap="serial", acceptance=0.6, draft_step_s=draft_step_s)
    gains = [controller.goodput(Plan(k), stats, 2) / controller.goodput(Plan(0), stats, 2) for k in AUTO_K]
    assert max(gains) > 1.02
    assert (max(gains) < MIN_SPEEDUP) is is_off
    stats.plan = Plan(0)
    assert chosen(controller, stats, num_running=2).is_off is is_off


def test_one_session_that_tries_does_not_make_the_others_try() -> None:
    controller, _ = measured(hits=0.0, acceptance=0.02)
    sessions = [controller.start_session(request()) for _ in range(4)]
    for stats in sessions:
        stats.rounds_off = EXPLORATION_INTERVAL_ROUNDS
    trying = sessions[0]
    for _ in range(4 * EXPLORATION_INTERVAL_ROUNDS):
        controller.observe_round(sessions[1], 0, 0)
    trying.plan, trying.rounds_to_replan = Plan(0), 0
    assert not chosen(controller, trying, num_running=4).is_off and trying.is_exploring
    controller.observe_round(trying, 4, 0)
    for stats in sessions[1:]:
        stats.plan, stats.rounds_to_replan = Plan(0), 0
        assert chosen(controller, stats, num_running=4).is_off


def test_what_drafts_without_a_model_is_tried_by_each_session() -> None:
    controller, _ = measured(hits=0.0, acceptance=0.02)
    local = controller.length_of("fallback", prior_acceptance=0.02)
    sessions = [local.start_session(request()) for _ in range(4)]
    tried = 0
    for _ in range(EXPLORATION_INTERVAL_ROUNDS + 32):
        for stats in sessions:
            plan = local.plan(stats, num_remaining=50, num_running=4)
            tried += not plan.is_off
            local.observe_round(stats, plan.num_speculative_tokens, 0)
    assert tried >= 4 * EXPLORATION_ROUNDS


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
