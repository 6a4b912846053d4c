"""The simple control: one K with a bound, and an experiment that keeps sessions at 0.98 of plain decoding."""

from __future__ import annotations

import random

import pytest

from specray.control.controller import Controller
from specray.control.simple import PRIOR_SPEEDUP, SIMPLE_K, SIMPLE_MIN_ACCEPTANCE
from specray.control.state import Mode, Reason, SessionStats
from specray.requests import SpeculationParams
from tests.unit.router.harness import request, speculation_config


def simple_controller(**config: object) -> Controller:
    controller = Controller(speculation_config(control="simple", overlap="serial", **config))
    for rows in (1, 8, 64, 512):
        controller.cost_model.target.add(rows, 0.020, is_overlapped=False)
    return controller


@pytest.mark.parametrize("num_running", [1, 8])
def test_every_session_has_the_same_k_and_bound(num_running: int) -> None:
    controller = simple_controller()
    for index in range(num_running):
        stats = controller.start_session(request(f"r{index}"))
        plan = controller.plan(stats, num_remaining=100, num_running=num_running)
        assert (plan.num_speculative_tokens, plan.min_acceptance) == (SIMPLE_K, SIMPLE_MIN_ACCEPTANCE)
        assert plan.reason is Reason.PROFITABLE
    assert controller.modes.calibrated_speedup == PRIOR_SPEEDUP


def test_tokens_that_rejection_draws_have_no_bound() -> None:
    controller = simple_controller()
    stats = controller.start_session(request())
    stats.draft_knows_acceptance = False
    plan = controller.plan(stats, num_remaining=100, num_running=1)
    assert (plan.num_speculative_tokens, plan.min_acceptance) == (SIMPLE_K, 0.0)


def test_a_k_that_was_asked_for_stands() -> None:
    controller = simple_controller()
    stats = controller.start_session(request(speculation=SpeculationParams(num_speculative_tokens=3)))
    plan = controller.plan(stats, num_remaining=100, num_running=1)
    assert (plan.num_speculative_tokens, plan.reason) == (3, Reason.FIXED)


def test_drafts_at_no_cost_are_measured_as_ever() -> None:
    local = simple_controller().beside("ngram", prior_acceptance=0.9)
    stats = local.start_session(request())
    assert local.plan(stats, num_remaining=100, num_running=1).num_speculative_tokens > SIMPLE_K


def work(controller: Controller, sessions: list[SessionStats], speedup: float, num_steps: int) -> float:
    """Tokens per second over plain decoding, on a machine on which the model has that speedup."""
    chance = random.Random(f"{speedup} {len(sessions)}")
    num_running, tokens, seconds = len(sessions), 0.0, 0.0
    for _ in range(num_steps):
        plans = [controller.plan(stats, num_remaining=1000, num_running=num_running) for stats in sessions]
        is_drafted = not plans[0].is_off
        # All work alike: nobody explores alone.
        assert {plan.is_off for plan in plans} == {not is_drafted}
        num_tokens = sum(chance.choice((1, 3)) if is_drafted else 1 for _ in sessions)
        took = 0.020 * 2 / speedup if is_drafted else 0.020
        for stats in sessions:
            controller.observe_round(stats, SIMPLE_K if is_drafted else 0, 1 if is_drafted else 0)
        controller.modes.end_step(
            took, num_sessions=num_running, num_running=num_running, num_tokens=num_tokens
        )
        for stats in sessions:
            if controller.is_replan_near(stats, num_running):
                controller.prepare(stats, num_running)
        tokens += num_tokens / num_running
        seconds += took
    return tokens * 0.020 / seconds


@pytest.mark.slow
@pytest.mark.parametrize("num_running", [1, 8])
@pytest.mark.parametrize("speedup", [0.5, 0.9, 1.0, 1.5, 2.5])
def test_no_slower_than_098_of_the_best_mode_once_experiments_have_shown_it(
    speedup: float, num_running: int
) -> None:
    controller = simple_controller()
    sessions = [controller.start_session(request(f"r{index}")) for index in range(num_running)]
    work(controller, sessions, speedup, 1000)
    assert work(controller, sessions, speedup, 5000) > 0.98 * max(1.0, speedup)
    # Without a gain either mode will do.
    assert speedup == 1.0 or (controller.modes.mode is Mode.MODEL) is (speedup > 1.0)


@pytest.mark.slow
def test_speculation_returns_when_the_machine_has_changed() -> None:
    controller = simple_controller()
    sessions = [controller.start_session(request(f"r{index}")) for index in range(8)]
    work(controller, sessions, 0.6, 2000)
    assert controller.modes.mode is not Mode.MODEL
    work(controller, sessions, 1.8, 6000)
    assert controller.modes.mode is Mode.MODEL
