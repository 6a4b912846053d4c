"""Every plan has the reason for which it was chosen, set where it is decided."""

from __future__ import annotations

import pytest

from specray.control.controller import REFUSED_REST_ROUNDS, Controller
from specray.control.experiments import EXPLORATION_INTERVAL_ROUNDS, Experiment, StepWindow
from specray.control.state import OFF_BY_REASON, Mode, Plan, Reason, SessionStats
from specray.requests import SpeculationParams
from tests.unit.router.harness import request, speculation_config


def controller_of(*, verify_s: float = 0.020, draft_step_s: float = 0.002, **config: object) -> Controller:
    """A controller that knows a target whose steps take the same at any size."""
    controller = Controller(speculation_config(overlap="serial", **config))
    for rows in (1, 8, 64):
        controller.cost_model.target.add(rows, verify_s, is_overlapped=False)
    controller.cost_model.draft.expect({1: draft_step_s})
    return controller


def reason_of(controller: Controller, stats: SessionStats, *, num_remaining: int = 100) -> Reason:
    """Of a session beside another."""
    plan = controller.plan(stats, num_remaining=num_remaining, num_running=2)
    # Without speculation the plan is one of those that every session shares.
    assert not plan.is_off or plan is OFF_BY_REASON[plan.reason]
    return plan.reason


@pytest.mark.parametrize("k", [0, 4])
def test_a_configured_k_is_fixed(k: int) -> None:
    controller = controller_of(num_speculative_tokens=k)
    assert reason_of(controller, controller.start_session(request())) is Reason.FIXED


def test_a_request_that_is_not_to_be_drafted_for_is_fixed() -> None:
    controller = controller_of()
    given = request(speculation=SpeculationParams(enabled=False))
    stats = controller.start_session(given)
    assert reason_of(controller, stats) is Reason.FIXED
    assert controller.resting_plan(stats, 2) is OFF_BY_REASON[Reason.FIXED]


def test_before_anything_is_measured_a_plan_is_unmeasured() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    assert reason_of(controller, controller.start_session(request())) is Reason.UNMEASURED


@pytest.mark.parametrize(
    ("draft_step_s", "reason"), [(0.002, Reason.PROFITABLE), (0.100, Reason.UNPROFITABLE)]
)
def test_measurements_say_whether_speculation_is_profitable(draft_step_s: float, reason: Reason) -> None:
    controller = controller_of(draft_step_s=draft_step_s)
    stats = controller.start_session(request())
    assert reason_of(controller, stats) is reason
    assert (controller.resting_plan(stats, 2) is None) is (reason is Reason.PROFITABLE)


def test_the_last_token_needs_no_draft() -> None:
    controller = controller_of()
    stats = controller.start_session(request())
    assert [reason_of(controller, stats, num_remaining=left) for left in (2, 1)] == [
        Reason.PROFITABLE,
        Reason.LAST_TOKEN,
    ]


def test_a_refused_session_rests_for_some_rounds() -> None:
    controller = controller_of()
    stats = controller.start_session(request())
    controller.observe_refusal(stats)
    reasons = []
    for _ in range(REFUSED_REST_ROUNDS + 1):
        reasons.append(reason_of(controller, stats))
        controller.observe_round(stats, 0, 0)
    assert reasons == [Reason.REFUSED] * REFUSED_REST_ROUNDS + [Reason.PROFITABLE]


def test_a_session_that_several_drafts_were_lost_with_rests_for_good() -> None:
    controller = controller_of()
    stats = controller.start_session(request())
    controller.observe_refusal(stats, is_final=True)
    for _ in range(2 * REFUSED_REST_ROUNDS):
        controller.observe_round(stats, 0, 0)
    assert reason_of(controller, stats) is Reason.REFUSED


def running(base: Mode, tried: Mode) -> Experiment:
    return Experiment(base, tried, 1.5, StepWindow(8), StepWindow(8), StepWindow(8), num_left=99)


def test_an_experiment_with_plain_decoding_sets_plans_aside() -> None:
    controller = controller_of()
    stats = controller.start_session(request())
    assert reason_of(controller, stats) is Reason.PROFITABLE
    controller.modes.experiments.running = running(Mode.MODEL, Mode.PLAIN)
    assert reason_of(controller, stats) is Reason.EXPERIMENT
    # Drafts at no cost take no part in it, nor does a K that was asked for.
    fixed = controller.start_session(request(speculation=SpeculationParams(num_speculative_tokens=4)))
    assert reason_of(controller, fixed) is Reason.FIXED


def test_an_experiment_with_the_model_gives_plans() -> None:
    controller = controller_of(draft_step_s=0.100)
    stats = controller.start_session(request())
    assert reason_of(controller, stats) is Reason.UNPROFITABLE
    controller.modes.experiments.running = running(Mode.PLAIN, Mode.MODEL)
    controller.modes.num_changes += 1
    plan = controller.plan(stats, num_remaining=100, num_running=2)
    assert (plan.is_off, plan.reason) == (False, Reason.EXPERIMENT)


def test_after_a_window_with_the_model_all_sessions_go_back_to_plain_decoding() -> None:
    """The plan of all stands until the next decision, which waits for the experiment's last window."""
    controller = controller_of(draft_step_s=0.100)
    sessions = [controller.start_session(request(f"r{index}")) for index in range(4)]

    def reasons() -> list[Reason]:
        plans = [controller.plan(stats, num_remaining=100, num_running=4) for stats in sessions]
        return [plan.reason for plan in plans]

    assert reasons() == [Reason.UNPROFITABLE] * 4
    experiment = controller.modes.experiments.running = running(Mode.PLAIN, Mode.MODEL)
    controller.modes.set_plan(Plan(4))
    assert reasons() == [Reason.EXPERIMENT] * 4
    for _ in range(8):
        experiment.during.add(1.0, 0.1)
    controller.modes.num_changes += 1
    assert reasons() == [Reason.UNPROFITABLE] * 4


def test_one_session_explores_for_two_rounds() -> None:
    controller = controller_of(draft_step_s=0.100)
    stats = controller.start_session(request())
    reasons = []
    for _ in range(4 * EXPLORATION_INTERVAL_ROUNDS):
        reasons.append(reason_of(controller, stats))
        num_drafts = stats.plan.num_speculative_tokens if stats.plan is not None else 0
        controller.observe_round(stats, num_drafts, 0)
    assert reasons.count(Reason.EXPLORATION) == 2
    assert set(reasons) == {Reason.EXPLORATION, Reason.UNPROFITABLE}


def test_a_reason_is_no_part_of_what_a_plan_is() -> None:
    assert Plan(4, reason=Reason.FIXED) == Plan(4, reason=Reason.PROFITABLE)
    assert [plan.is_off for plan in OFF_BY_REASON.values()] == [True] * len(Reason)
