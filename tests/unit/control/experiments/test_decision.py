"""What all decide from experiments: a simulated machine holds sessions to 0.98 of the best way."""

from __future__ import annotations

import math
import random

import pytest

from specray.control.controller import Controller
from specray.control.experiments import (
    FIRST_INTERVAL_STEPS,
    PLAIN_STEPS,
    Experiment,
    StepWindow,
    num_window_steps,
)
from specray.control.mode import FIRST_DECISION_STEPS, OFF_DECISION_STEPS, ModeController
from specray.control.state import OFF, Mode, Plan, SessionStats
from tests.unit.control.experiments.harness import NUM_RUNNING, sessions_of, step_of
from tests.unit.control.harness import goodput_of
from tests.unit.router.harness import request, speculation_config


def test_a_decision_turns_begins_experiments_and_ends_those_of_other_numbers() -> None:
    modes = ModeController()
    on = sessions_of(NUM_RUNNING, Plan(3))
    modes.decide(1.5, NUM_RUNNING)
    kept = modes.experiments.calibration(Mode.MODEL, NUM_RUNNING)
    kept.interval = 4096
    modes.decide(0.9, NUM_RUNNING)
    assert modes.mode is Mode.NGRAM
    modes.decide(1.5, NUM_RUNNING)
    # It is seen soon what it brings now.
    assert kept.interval == 0
    for _ in range(2 + FIRST_INTERVAL_STEPS):
        step_of(modes, on, 0.1, 12, is_drafted=True)
    num_changes = modes.num_changes
    modes.decide(1.5, NUM_RUNNING)
    assert modes.is_trying_plain and modes.num_changes == num_changes + 1
    for _ in range(2 + PLAIN_STEPS):
        assert modes.is_trying_plain
        step_of(modes, on, 0.1, NUM_RUNNING, is_drafted=False)
    assert not modes.is_trying_plain and not modes.is_due(NUM_RUNNING)
    for _ in range(2 + num_window_steps(Mode.MODEL, NUM_RUNNING)):
        assert not modes.is_due(NUM_RUNNING)
        modes.take_mean(on[0])
        step_of(modes, on, 0.1, 12, is_drafted=True)
    # What was tried is weighed at once.
    assert modes.is_due(NUM_RUNNING)
    modes.experiments.running = Experiment(
        Mode.MODEL, Mode.PLAIN, 1.5, StepWindow(8), StepWindow(8), StepWindow(8), num_left=9
    )
    modes.decide(1.5, NUM_RUNNING // 2)
    assert modes.experiments.running is None


def test_steps_with_fallback_have_no_plan_with_the_model() -> None:
    modes = ModeController(mode=Mode.NGRAM)
    mixed = [*sessions_of(3, OFF), *sessions_of(1, Plan(3))]
    step_of(modes, mixed, 0.1, 4, is_drafted=True)
    assert modes.experiments.num_steps == 0
    step_of(modes, mixed[:3], 0.1, 4, is_drafted=True)
    assert modes.experiments.num_steps == 1


def test_what_is_promised_of_many_is_of_plans_that_many_may_be_under() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    for rows in (1, 4, 32, 256):
        controller.cost_model.target.add(rows, 0.020, is_overlapped=False)
    controller.cost_model.observe_proposals([4], 4 * 0.0005, 0.0)
    stats = controller.start_session(request())
    stats.draft_knows_acceptance = False
    for _ in range(200):
        stats.acceptance.add(1, 1)
    goodput = goodput_of(controller)
    plain = goodput.plain_goodput(1)
    for num_running, longest in ((3, 16), (4, 7)):
        speedup = goodput.speedup(stats, num_running)
        assert speedup == pytest.approx(controller.goodput(Plan(longest), stats, num_running) / plain)


@pytest.mark.slow
@pytest.mark.parametrize("num_running", [1, 8, 64])
@pytest.mark.parametrize(
    ("predicted_speedup", "model", "fallback"),
    [
        (1.4, 0.7, 0.9),
        (1.4, 0.95, 1.0),
        (1.1, 1.5, 1.0),
        (1.5, 1.5, 0.9),
        (0.7, 0.6, 0.8),
        (0.7, 0.6, 1.3),
        (3.0, 3.0, 1.1),
        (2.2, 0.9, 1.0),
    ],
)
def test_whatever_was_promised_all_work_about_as_fast_as_the_best_way(
    predicted_speedup: float, model: float, fallback: float, num_running: int
) -> None:
    """A machine whose own speed wanders by a third; tokens of a round with drafts are left to chance."""
    chance = random.Random(f"{predicted_speedup} {model} {fallback} {num_running}")
    speedups = {Mode.PLAIN: 1.0, Mode.NGRAM: fallback, Mode.MODEL: model}
    modes = ModeController()
    tokens, best = [0.0, 0.0], [0.0, 0.0]
    num_first, num_steps = 1200, 6000
    on, off = sessions_of(num_running, Plan(3)), sessions_of(num_running, OFF)
    for step in range(num_steps):
        if modes.is_due(num_running):
            modes.take_mean(off[0])
            modes.decide(predicted_speedup, num_running)
        mode = modes.experiments.tried
        mode = modes.mode if mode is None else mode
        assert mode is not None
        sessions = on if modes.uses_model else off
        pace = 1 + 0.3 * math.sin(step / 300) + chance.uniform(-0.05, 0.05)
        per_round = 1.0 if mode is Mode.PLAIN else 2.0
        num_tokens = sum(chance.choice((0.5, 1.5)) * per_round for _ in range(num_running))
        num_tokens = num_running if mode is Mode.PLAIN else num_tokens
        took = pace * per_round / speedups[mode]
        step_of(modes, sessions, took, num_tokens, is_drafted=mode > Mode.PLAIN)
        is_late = step >= num_first
        tokens[is_late] += num_tokens / num_running
        best[is_late] += took / pace * max(speedups.values())
    assert tokens[True] > 0.975 * best[True]
    # What is not known yet must be seen first.
    assert sum(tokens) > 0.94 * sum(best)


def test_steps_that_show_nothing_are_passed_by() -> None:
    modes = ModeController()
    on, off = sessions_of(4, Plan(3)), sessions_of(4, OFF)
    modes.decide(1.5, 4)
    assert modes.mode is Mode.MODEL

    def seen(sessions: list[SessionStats], seconds: float | None = 0.1, **options: bool) -> bool:
        before = modes.experiments.num_steps
        step_of(modes, sessions, seconds, 8, **({"is_drafted": True} | options))
        return modes.experiments.num_steps > before

    # After a turn two steps are left aside, and those in which the draft catches up.
    assert not seen(on, is_reading=True)
    assert [seen(on) for _ in range(3)] == [False, False, True]
    # From then on reading is what the model costs.
    assert seen(on, is_reading=True)
    assert not seen(on, None)
    assert not seen(on, 0.0)
    assert not seen(off)
    assert not seen([*on[:3], off[0]])
    # Its draft is not there.
    assert not seen(on, is_drafted=False)
    on[0].is_exploring = True
    assert not seen(on)


def test_plain_steps_have_no_draft_tokens_and_no_reading() -> None:
    modes = ModeController(mode=Mode.PLAIN)
    off = sessions_of(4, OFF)

    def seen(**options: bool) -> bool:
        before = modes.experiments.num_steps
        step_of(modes, off, 0.1, 4, **({"is_drafted": False} | options))
        return modes.experiments.num_steps > before

    assert seen()
    assert not seen(is_drafted=True)
    assert not seen(is_reading=True)
    assert modes.is_plain and modes.uses_model is False


def test_plans_stand_while_none_is_tried_and_are_chosen_anew_when_the_model_is() -> None:
    modes = ModeController()
    modes.decide(1.5, 8)
    num_changes = modes.num_changes
    modes.experiments.running = Experiment(
        Mode.MODEL, Mode.PLAIN, 1.5, StepWindow(8), StepWindow(8), StepWindow(8), num_left=9
    )
    assert modes.uses_model and modes.is_plain and modes.is_trying_plain
    # Nothing is decided meanwhile, unless about half as many run.
    (stats,) = sessions_of(1, Plan(3))
    for _ in range(8 * FIRST_DECISION_STEPS):
        modes.add(stats)
    assert not modes.is_due(8)
    assert modes.is_due(4)
    modes.mode = Mode.PLAIN
    modes.experiments.running = Experiment(
        Mode.PLAIN, Mode.MODEL, 1.5, StepWindow(8), StepWindow(8), StepWindow(8), num_left=9
    )
    assert modes.uses_model and not modes.is_plain and not modes.is_trying_plain
    assert modes.num_changes == num_changes


def test_without_the_model_decisions_become_rare_until_a_session_has_tried_it() -> None:
    modes = ModeController()
    (stats,) = sessions_of(1, OFF)
    lengths = []
    for _ in range(5):
        modes.decide(0.5, 1)
        num_rounds = 0
        while not modes.is_due(1):
            modes.add(stats)
            num_rounds += 1
        modes.take_mean(stats)
        lengths.append(num_rounds)
    assert lengths == [FIRST_DECISION_STEPS, 16, 64, OFF_DECISION_STEPS, OFF_DECISION_STEPS]
    modes.decide(0.5, 1)
    for _ in range(20):
        modes.add(stats)
    assert not modes.is_due(1)
    stats.is_exploring = True
    modes.add(stats)
    assert modes.is_due(1)


def test_an_experiment_does_not_wait_for_a_decision_that_is_far_away() -> None:
    modes = ModeController()
    off = sessions_of(NUM_RUNNING, OFF)
    for _ in range(4):
        # ControlObserver are for 4, 16, 64 and 128 steps.
        modes.decide(0.5, NUM_RUNNING)
    assert modes.mode is Mode.NGRAM
    num_steps = 0
    while not modes.is_due(NUM_RUNNING):
        step_of(modes, off, 0.1, NUM_RUNNING, is_drafted=True)
        num_steps += 1
    assert num_steps == 2 + FIRST_INTERVAL_STEPS
    modes.take_mean(off[0])
    modes.decide(0.5, NUM_RUNNING)
    assert modes.is_trying_plain and not modes.is_due(NUM_RUNNING)
    # With others beside them they are not as many as the experiment would be of.
    other = ModeController()
    other.decide(0.5, NUM_RUNNING)
    for _ in range(FIRST_INTERVAL_STEPS + 2):
        other.take_mean(off[0])
        step_of(other, off, 0.1, NUM_RUNNING, is_drafted=True)
    assert other.is_due(NUM_RUNNING)
    other.decide(0.5, 2 * NUM_RUNNING - 1)
    step_of(other, off, 0.1, NUM_RUNNING, is_drafted=True)
    assert not other.is_due(2 * NUM_RUNNING - 1)
