"""What is chosen when: by configuration and request, at first, on a slow machine, and for how long."""

from __future__ import annotations

import pytest

from specray.control.controller import FEW_ROUNDS_OFF, Controller
from specray.control.goodput import AUTO_K
from specray.control.state import OFF, Plan
from specray.requests import SpeculationParams
from specray.types import Overlap
from tests.unit.control.harness import chosen, measured
from tests.unit.router.harness import budgets, request, speculation_config

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


# Auto


def test_the_only_session_considers_a_dear_draft_once_in_a_few_rounds() -> None:
    controller, stats = measured(overlap="serial", draft_step_s=0.100, acceptance=0.1)
    considered = []
    for _ in range(4 * FEW_ROUNDS_OFF):
        considered.append(controller.resting_plan(stats, 1) is None)
        if considered[-1]:
            assert chosen(controller, stats) is OFF
        controller.observe_round(stats, 0, 0)
    rests = [True, *[False] * (FEW_ROUNDS_OFF - 1)]
    assert considered == [*[True] * FEW_ROUNDS_OFF, *rests * 3]


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


def test_first_plan_before_any_measurement_speculates_moderately() -> None:
    controller = Controller(speculation_config(overlap="auto"))
    assert chosen(controller, controller.start_session(request())) == Plan(3)


def test_patience_is_unknown_before_the_first_proposal_and_follows_the_draft_after() -> None:
    assert budgets(Controller(speculation_config())).patience_s() is None
    controller, _ = measured(num_speculative_tokens=4, draft_step_s=0.010)
    assert budgets(controller).patience_s() == pytest.approx(4 * (6.6 * 0.010 + 0.0002))


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
