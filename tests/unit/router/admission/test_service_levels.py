"""Sessions whose service level is at risk get the rows of those that have room; outputs stay the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specray.fakes import FakeTarget, PerfectGuesser, VirtualClock
from specray.requests import GenerateRequest, ServiceLevel
from specray.router.admission.service_levels import LOWER_STEPS, MAX_YIELD, RAISE_STEPS, ServiceLevels
from specray.router.live_session import LiveSession
from specray.router.trace import VerdictReceived, decode_trace
from tests.unit.router.harness import (
    MODEL,
    PROMPT,
    expected,
    fake_draft,
    in_virtual_time,
    request,
    router_config,
    serving,
)


def live(level: ServiceLevel | None = None, **values: object) -> LiveSession:
    """A session of which only the request and the times are looked at."""
    made = object.__new__(LiveSession)
    session = type("Only", (), {"request": replace(request(), level=level), "is_prefilling": False})
    defaults = {
        "session": session,
        "arrived_s": 0.0,
        "first_token_s": 1.0,
        "pace_s": None,
        "last_step": 0,
    }
    for name, value in {**defaults, **values}.items():
        setattr(made, name, value)
    return made


ITL = ServiceLevel(itl_ms=20)


def test_without_levels_nobody_yields() -> None:
    levels = ServiceLevels({"a": live(pace_s=9.0)})
    for step in range(100):
        levels.begin_step(float(step))
    assert levels.degree == 0


@pytest.mark.parametrize(("pace_s", "degree"), [(0.018, 0), (0.0181, 1)])
def test_a_level_is_at_risk_a_tenth_before_it_is_missed(pace_s: float, degree: int) -> None:
    levels = ServiceLevels({"a": live(ITL, pace_s=pace_s)})
    levels.begin_step(2.0)
    assert levels.degree == degree


def test_a_first_token_is_at_risk_from_half_its_time() -> None:
    waiting = live(ServiceLevel(ttft_ms=500), first_token_s=None)
    levels = ServiceLevels({"a": waiting})
    levels.begin_step(0.249)
    assert levels.degree == 0
    levels.begin_step(0.25)
    assert levels.degree == 1


def test_prompts_take_little_of_a_step_unless_a_first_token_is_what_is_at_risk() -> None:
    running = {"a": live(ITL, pace_s=0.03)}
    levels = ServiceLevels(running)
    assert not levels.spares_steps
    levels.begin_step(2.0)
    assert levels.spares_steps
    running["b"] = live(ServiceLevel(ttft_ms=500), first_token_s=None)
    levels.begin_step(2.0)
    assert not levels.spares_steps


def test_others_yield_more_while_it_is_not_enough_and_less_afterwards() -> None:
    told: list[int] = []
    slow = live(ITL, pace_s=0.03)
    levels = ServiceLevels({"a": slow}, on_change=told.append)
    for _ in range(RAISE_STEPS * 4):
        levels.begin_step(2.0)
    assert told == [1, 2, MAX_YIELD]
    slow.pace_s = 0.01
    for _ in range(LOWER_STEPS * 3):
        levels.begin_step(2.0)
    assert told == [1, 2, 3, 2, 1, 0]


def test_who_has_room_yields_and_who_has_not_does_not() -> None:
    best_effort, at_ease, close = live(pace_s=9.0), live(ITL, pace_s=0.014), live(ITL, pace_s=0.0141)
    levels = ServiceLevels({"a": live(ITL, pace_s=0.03)})
    levels.begin_step(2.0)
    assert [levels.is_without_draft(one) for one in (best_effort, at_ease, close)] == [True, True, False]


def test_sessions_with_room_take_turns_but_prompts_and_lone_ones_go_on() -> None:
    levels = ServiceLevels({})
    levels.degree = 3
    rested, fresh, urgent = live(last_step=6), live(last_step=7), live(ITL, pace_s=0.03, last_step=9)
    assert levels.taking_part([rested, fresh, urgent], 10) == [rested, urgent]
    assert levels.taking_part([fresh], 10) == [fresh]


def test_the_most_pressing_prompt_goes_first() -> None:
    levels = ServiceLevels({})
    plain = live(first_token_s=None)
    late = live(ServiceLevel(ttft_ms=900), first_token_s=None)
    soon = live(ServiceLevel(ttft_ms=300), first_token_s=None)
    assert levels.first_tokens_first([plain, late, soon]) == [soon, late, plain]


@in_virtual_time
async def _paces(clock: VirtualClock, requests: list[GenerateRequest], **options: object) -> dict[str, float]:
    """Seconds per output token after the first of each request, served at once; checks the outputs."""
    target = FakeTarget(MODEL, cost=lambda rows: int((0.004 + 0.004 * rows) * 1e9))
    config = router_config(trace_events=100_000)
    async with serving(
        clock, target=target, draft=fake_draft(PerfectGuesser(MODEL)), config=config, **options
    ) as pair:
        times: dict[str, list[tuple[float, int]]] = {one.request_id: [] for one in requests}

        async def read(one: GenerateRequest) -> None:
            tokens: list[int] = []
            async for chunk in pair.router.stream(one):
                tokens += chunk.token_ids
                times[one.request_id].append((clock.monotonic(), len(tokens)))
            assert tuple(tokens) == expected(one)

        await asyncio.gather(*map(read, requests))
        events = decode_trace(await pair.router.trace_text() or "")
        reasons = {event.reason for event in events if isinstance(event, VerdictReceived)}
        kept = pair.counted("specray_service_levels_total", kind="itl", attained="true")
        missed = pair.counted("specray_service_levels_total", kind="itl", attained="false")
    spans = {name: (row[-1][0] - row[0][0]) / (row[-1][1] - row[0][1]) for name, row in times.items()}
    return {**spans, "kept": kept, "missed": missed, "yielded": float("service_level" in reasons)}


@pytest.mark.slow
def test_a_level_is_kept_where_the_rest_can_give_way() -> None:
    """Eight sessions; a step takes 4 ms and 4 ms a row. The level is about half of what it gets without."""
    others = [request(f"b{index}", (*PROMPT, index), max_tokens=150) for index in range(7)]
    wanted = request("a", max_tokens=100)
    without, with_level = (
        _paces([replace(wanted, level=level), *others], num_speculative_tokens=3, overlap="serial")
        for level in (None, ServiceLevel(itl_ms=20))
    )
    assert without["yielded"] == 0 and without["kept"] == without["missed"] == 0
    assert with_level["yielded"] == 1
    assert with_level["a"] <= 0.020 < 0.034 < without["a"]
    assert (with_level["kept"], with_level["missed"]) == (1, 0)
    assert with_level["b0"] > with_level["a"]
