"""Controllers that have measured an engine pair, and shorthands for what they are asked."""

from __future__ import annotations

from typing import Any

from specray.control.controller import Controller
from specray.control.goodput import WIDTHS, GoodputModel
from specray.control.overlap import DECISION_ROUNDS, UNDRAFTED_SHARE
from specray.control.state import Plan, SessionStats
from specray.engine_info import StepTime
from specray.types import DraftKind, Overlap
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


def goodput_of(controller: Controller, **config: Any) -> GoodputModel:
    """The goodput of serial plans by what the controller has measured."""
    speculation = speculation_config(**({"overlap": "serial"} | config))
    return GoodputModel(speculation, DraftKind.MODEL.value, controller.cost_model)


def worked(controller: Controller, stats: SessionStats) -> Overlap:
    """How engines work after as many rounds as a decision takes, of which nothing is known."""
    for _ in range(round(DECISION_ROUNDS / UNDRAFTED_SHARE)):
        controller.observe_pace(stats, 1, 0.020, num_running=1, plan=None)
    stats.rounds_to_replan = 0
    return chosen(controller, stats).overlap


def chosen(
    controller: Controller, stats: SessionStats, *, num_remaining: int = 100, num_running: int = 1
) -> Plan:
    return controller.plan(stats, num_remaining=num_remaining, num_running=num_running)
