"""What the router tells a tracer of a request, and whom it does not bother."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from specray.errors import DeadlineExceededError, EngineLostError
from specray.fakes import VirtualClock
from specray.requests import FinishReason, GenerateRequest, RequestLife
from tests.unit.router.harness import TARGET_S, fake_target, request, router_config, serving

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    """interfaces.RequestTracer with memory."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.lives: list[RequestLife] = []

    def request_ended(self, life: RequestLife, now: float) -> None:
        assert now == self._clock.monotonic() == life.ended_s
        self.lives.append(life)

    @property
    def life(self) -> RequestLife:
        (life,) = self.lives
        return life


def traced(request_id: str = "a", **fields: Any) -> GenerateRequest:
    return replace(request(request_id, **fields), traceparent=TRACE)


def spans(life: RequestLife) -> tuple[float | None, float | None, float]:
    """Seconds from arrival to admission, to the first token, to the end."""
    ends = (life.admitted_s, life.first_token_s, life.ended_s)
    admitted, first, ended = (None if end is None else round(end - life.arrived_s, 6) for end in ends)
    assert ended is not None
    return admitted, first, ended


async def test_a_request_is_told_once_with_its_times_and_counts(clock: VirtualClock) -> None:
    recorder = Recorder(clock)
    async with serving(clock, tracer=recorder, num_speculative_tokens=4) as pair:
        chunk = await pair.router.complete(traced(max_tokens=24))
        await pair.settle()
    life, stats = recorder.life, chunk.stats
    assert stats is not None and stats.num_spec_steps > 0
    assert (life.request_id, life.traceparent) == ("a", TRACE)
    assert life.finish_reason is FinishReason.LENGTH
    assert (life.num_prompt_tokens, life.num_output_tokens) == (5, 24)
    assert (life.stats, life.num_preemptions) == (stats, 0)
    # The first round has no draft tokens, every other does here.
    assert life.num_rounds >= stats.num_spec_steps
    admitted, first, ended = spans(life)
    assert (admitted, first) == (0.0, TARGET_S)
    assert ended >= TARGET_S * life.num_rounds
    assert chunk.ttft_s == pytest.approx(TARGET_S)


async def test_a_request_that_nobody_traces_is_not_told(clock: VirtualClock) -> None:
    recorder = Recorder(clock)
    async with serving(clock, tracer=recorder) as pair:
        await pair.router.complete(request())
    assert recorder.lives == []


async def test_time_in_the_queue_ends_with_a_place(clock: VirtualClock) -> None:
    recorder = Recorder(clock)
    target = fake_target(max_num_seqs=1)
    async with serving(clock, target=target, tracer=recorder, has_draft_model=False) as pair:
        await asyncio.gather(
            pair.router.complete(request("first", max_tokens=3)),
            pair.router.complete(traced("second", max_tokens=2)),
        )
    assert recorder.life.request_id == "second"
    assert spans(recorder.life) == (3 * TARGET_S, 4 * TARGET_S, 5 * TARGET_S)


async def test_a_deadline_in_the_queue_is_an_error_without_a_place(clock: VirtualClock) -> None:
    recorder = Recorder(clock)
    target = fake_target(max_num_seqs=1)
    config = router_config(request_timeout_s=100)
    async with serving(clock, target=target, config=config, tracer=recorder, has_draft_model=False) as pair:
        busy = asyncio.create_task(pair.router.complete(request("busy", max_tokens=50)))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceededError):
            await pair.router.complete(replace(traced("late"), timeout_s=0.1))
        await busy
    assert recorder.life.finish_reason is FinishReason.ERROR
    assert spans(recorder.life) == (None, None, 0.1)


async def test_a_caller_that_leaves_is_told_as_an_abort(clock: VirtualClock) -> None:
    recorder = Recorder(clock)
    async with serving(clock, tracer=recorder, has_draft_model=False) as pair:
        chunks = pair.router.stream(traced(max_tokens=40))
        await anext(chunks)
        await chunks.aclose()
        await pair.settle()
    assert recorder.life.finish_reason is FinishReason.ABORT
    assert recorder.life.num_output_tokens == 1


async def test_a_stop_of_the_service_tells_of_all_that_run(clock: VirtualClock) -> None:
    recorder = Recorder(clock)
    async with serving(clock, tracer=recorder, has_draft_model=False) as pair:
        calls = [asyncio.create_task(pair.router.complete(traced(name, max_tokens=40))) for name in "ab"]
        await asyncio.sleep(3.5 * TARGET_S)
        await pair.router.stop()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineLostError)
    assert {life.finish_reason for life in recorder.lives} == {FinishReason.ERROR}
    assert sorted(life.request_id for life in recorder.lives) == ["a", "b"]
