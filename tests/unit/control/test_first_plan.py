"""First plans are made from what engines say of their steps, and from how far away they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from specray.control.controller import Controller
from specray.control.expectations import expected_drafts, expected_steps, expected_tokens
from specray.control.goodput import ANY_K, AUTO_K, HANDLING_S
from specray.control.state import OFF, Plan
from specray.engine_info import EngineInfo, StepTime
from specray.fakes import LocalVerifier, VirtualClock
from specray.router.trace import Planned, VerdictReceived, decode_trace
from specray.router.transport.links import measure_round_trip
from tests.unit.control.harness import times
from tests.unit.router.harness import (
    budgets,
    fake_draft,
    fake_target,
    request,
    router_config,
    serving,
    speculation_config,
)


def expecting(
    target: Sequence[StepTime], draft: Sequence[StepTime], *, round_trip_s: float = 0.0
) -> Controller:
    controller = Controller(speculation_config(overlap="serial"))
    controller.cost_model.expect_target(target, 0.0)
    controller.cost_model.expect_draft(draft, round_trip_s)
    return controller


def first_plan(controller: Controller, *, num_running: int = 1) -> Plan:
    return controller.plan(controller.start_session(request()), num_remaining=100, num_running=num_running)


def num_draft_steps(k: int) -> float:
    """Of a proposal of at most k tokens, by the prior; one that ends early drafts one more."""
    return expected_drafts(k, 0.95) + 1 - 0.95 ** (k - 1)


def num_any_steps() -> float:
    """Of a proposal of any length, by the prior of four tokens."""
    return sum(step.chance for step in expected_steps(ANY_K, [3 / 4], 1))


def test_first_plan_is_the_optimum_of_what_the_engines_say() -> None:
    controller = expecting(
        times((1, 0.010), (64, 0.010)), times((1, 0.0005), (2, 0.0005)), round_trip_s=0.010
    )

    def goodput(k: int) -> float:
        return expected_tokens(0.7, k, 0.95) / (0.010 + 0.0005 * num_draft_steps(k) + 0.010 + HANDLING_S)

    # 4 draft tokens are expected, and of them as many as are accepted for each that is not at 0.7.
    any_k = (1 + 0.7 / 0.3) / (0.010 + 0.0005 * num_any_steps() + 0.010 + HANDLING_S)
    assert any_k > max(goodput(k) for k in AUTO_K)
    assert first_plan(controller) == Plan(ANY_K)
    stats = controller.start_session(request())
    assert controller.goodput(Plan(ANY_K), stats, 1) == pytest.approx(any_k)
    for k in AUTO_K:
        assert controller.goodput(Plan(k), stats, 1) == pytest.approx(goodput(k))
    assert controller.goodput(OFF, stats, 1) == pytest.approx(100.0)
    assert budgets(controller).patience_s() == pytest.approx(4 * (32 * 0.0005 + 0.010))


def test_first_plan_is_none_with_a_draft_slower_than_the_target() -> None:
    assert first_plan(expecting(times((1, 0.001), (64, 0.002)), times((1, 0.003)))) == OFF


def test_first_plan_is_none_where_rows_are_dear() -> None:
    controller = expecting(times((1, 0.010), (8, 0.060), (64, 0.500)), times((1, 0.0005)))
    assert first_plan(controller, num_running=16) == OFF


def test_first_plan_of_many_sessions_counts_what_drafting_for_all_takes() -> None:
    flat = times((1, 0.020), (64, 0.020))
    cheap = expecting(flat, times((1, 0.001), (32, 0.001)))
    dear = expecting(flat, times((1, 0.001), (32, 0.032)))
    assert first_plan(cheap) == Plan(ANY_K)
    # Of sixteen proposals one is long, and all wait for it.
    assert first_plan(cheap, num_running=16) == Plan(4)
    assert first_plan(dear, num_running=16) == OFF


def test_way_to_the_target_is_part_of_its_steps() -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_target(times((1, 0.010)), 0.004)
    assert controller.cost_model.usual_verify_s(1, 1) == pytest.approx(0.014)


async def test_router_takes_the_engines_at_their_word_when_it_connects(clock: VirtualClock) -> None:
    """20 ms a Verify and 0.5 ms a draft token: the draft may go on for as long as it is sure."""
    target = fake_target(step_times=times((1, 0.020), (64, 0.020)))
    draft = fake_draft(step_times=times((1, 0.0005), (32, 0.0005)))
    config = router_config(trace_events=100)
    async with serving(clock, target=target, draft=draft, overlap="serial", config=config) as pair:
        await pair.router.complete(request(max_tokens=12))
        first = next(e for e in decode_trace(await pair.router.trace_text() or "") if type(e) is Planned)
        assert (first.overlap, first.num_speculative_tokens) == ("serial", ANY_K)
        serial = (1 + 0.7 / 0.3) / (0.020 + 0.0005 * num_any_steps() + HANDLING_S)
        assert first.tokens_per_s == pytest.approx({"off": 50.0, "serial": serial})
        text = await pair.router.metrics_text()
        assert 'specray_step_time_seconds{engine="target",rows="64"} 0.02' in text
        assert 'specray_step_time_seconds{engine="draft",rows="1"} 0.0005' in text
        events = decode_trace(await pair.router.trace_text() or "")
        verdicts = [event for event in events if isinstance(event, VerdictReceived)]
        assert [verdict.reason for verdict in verdicts] == [
            "prefill",
            *["profitable"] * (len(verdicts) - 2),
            "last_token",
        ]


async def test_an_engine_that_does_not_answer_is_no_distance_away(clock: VirtualClock) -> None:
    verifier = LocalVerifier(fake_target(), clock)
    verifier.lose()
    assert await measure_round_trip(verifier.fetch_info, clock) == 0.0


async def test_round_trip_is_the_least_of_three(clock: VirtualClock) -> None:
    delays: Iterator[float] = iter((0.005, 0.003, 0.004))
    info = fake_draft().info

    async def fetch_info() -> EngineInfo:
        await clock.sleep(next(delays))
        return info

    assert await measure_round_trip(fetch_info, clock) == pytest.approx(0.003)
    assert list(delays) == []
