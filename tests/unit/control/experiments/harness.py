"""Steps as experiments and decisions see them, of sessions under one plan."""

from __future__ import annotations

from specray.control.controller import Controller
from specray.control.experiments import (
    FIRST_INTERVAL_STEPS,
    PLAIN_STEPS,
    Experiments,
    num_window_steps,
)
from specray.control.mode import ModeController
from specray.control.state import Mode, Plan, SessionStats
from tests.unit.router.harness import request, speculation_config

NUM_RUNNING = 8
PROMISES = {Mode.NGRAM: 1.0, Mode.MODEL: 1.5}


def steps(
    experiments: Experiments, mode: Mode, count: int, tokens_per_s: float, num_running: int = NUM_RUNNING
) -> list[bool]:
    """Steps of a tenth of a second; says of each whether something has turned."""
    return [
        experiments.observe(mode, num_running, 0.1 * tokens_per_s * num_running, 0.1) for _ in range(count)
    ]


def tried(
    experiments: Experiments,
    *,
    speedup: float,
    predicted_speedup: float = 1.5,
    num_running: int = NUM_RUNNING,
) -> None:
    """A whole experiment of plain decoding beside the model."""
    experiments.switch_to(Mode.MODEL, num_running)
    size = num_window_steps(Mode.MODEL, num_running)
    promises = PROMISES | {Mode.MODEL: predicted_speedup}
    steps(experiments, Mode.MODEL, max(size, FIRST_INTERVAL_STEPS), speedup, num_running)
    assert experiments.begin(Mode.MODEL, promises, num_running) is Mode.PLAIN
    assert steps(experiments, Mode.PLAIN, PLAIN_STEPS, 1.0, num_running)[-1]
    assert steps(experiments, Mode.MODEL, size, speedup, num_running)[-1]
    assert experiments.running is None


def step_of(
    modes: ModeController,
    sessions: list[SessionStats],
    seconds: float | None,
    num_tokens: int,
    *,
    is_drafted: bool,
    is_reading: bool = False,
) -> None:
    for stats in sessions:
        modes.add(stats, is_drafted=is_drafted)
    modes.end_step(
        seconds,
        is_reading=is_reading,
        num_sessions=len(sessions),
        num_running=len(sessions),
        num_tokens=num_tokens,
    )


def sessions_of(num_running: int, plan: Plan) -> list[SessionStats]:
    controller = Controller(speculation_config())
    sessions = [controller.start_session(request(f"r{index}")) for index in range(num_running)]
    for stats in sessions:
        stats.plan = plan
    return sessions
