"""Router client over a Serve handle: translated Ray errors, no leaked calls, and resumption."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from specray.actors.client import ServeRouterClient, translate
from specray.actors.mailbox import Mailbox
from specray.errors import EngineLostError, OverloadedError
from specray.fakes.clock import VirtualClock
from specray.requests import FinishReason, GenerateRequest, OutputChunk, Resumption
from specray.types import SamplingParams


class Response:
    """A DeploymentResponse that never resolves."""

    is_cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.sleep(60).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A DeploymentHandle that answers every method with one response."""

    def __init__(self) -> None:
        self.response = Response()
        self.service_info = self

    def remote(self) -> Response:
        return self.response


def test_a_full_router_is_overload_and_a_dead_one_is_lost() -> None:
    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    assert isinstance(translate(full), OverloadedError)
    assert isinstance(translate(RayActorError()), EngineLostError)


async def test_a_silent_router_is_lost_and_its_call_cancelled() -> None:
    handle: Any = Handle()
    with pytest.raises(EngineLostError, match=r"did not answer within 0\.01 s"):
        await ServeRouterClient(handle, timeout_s=0.01).service_info()
    assert handle.response.is_cancelled


async def test_a_cancelled_caller_cancels_the_call() -> None:
    handle: Any = Handle()
    call = asyncio.ensure_future(ServeRouterClient(handle, timeout_s=60).service_info())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert handle.response.is_cancelled


class Deliveries(Handle):
    """A Router deployment that puts scripted chunks into the mailbox."""

    def __init__(self, mailbox: Mailbox, chunks: Sequence[OutputChunk], end: Exception | None = None) -> None:
        self.deliver = self
        self.response = Response()
        self._mailbox = mailbox
        self._chunks = chunks
        self._end = end

    def remote(self, *arguments: object) -> Any:
        return self if self._end is not None or self._chunks else self.response

    def __await__(self) -> Generator[Any, None, None]:
        return self._play().__await__()

    async def _play(self) -> None:
        self._mailbox.put(self._chunks)
        await asyncio.sleep(0)
        if self._end is not None:
            raise self._end

    def cancel(self) -> None:
        self.response.cancel()


REQUEST = GenerateRequest("a", (1,), SamplingParams(), 8)


def mailbox() -> Mailbox:
    return Mailbox("unix:/nowhere")


async def test_a_stream_is_what_came_into_the_mailbox() -> None:
    box = mailbox()
    chunks = [OutputChunk("a", (1,)), OutputChunk("a", (2,), finish_reason=FinishReason.LENGTH)]
    handle: Any = Deliveries(box, chunks)
    client = ServeRouterClient(handle, timeout_s=60, mailbox=box)
    received = [chunk async for chunk in client.stream(REQUEST)]
    assert sum((chunk.token_ids for chunk in received), ()) == (1, 2)
    assert received[-1].finish_reason is FinishReason.LENGTH
    box.open("a")  # The id is free: nothing of the request is left.


async def test_a_stream_that_is_closed_cancels_the_call() -> None:
    box = mailbox()
    handle: Any = Deliveries(box, [])
    stream: Any = ServeRouterClient(handle, timeout_s=60, mailbox=box).stream(REQUEST)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()
    await asyncio.sleep(0)
    assert handle.response.is_cancelled


async def _whole(client: ServeRouterClient) -> tuple[int, ...]:
    return (await client.complete(REQUEST)).token_ids


async def _streamed(client: ServeRouterClient) -> tuple[int, ...]:
    return sum([chunk.token_ids async for chunk in client.stream(REQUEST)], ())


class Mortals:
    """A Router deployment that plays one part of the script per call, after which its replica dies.

    A part is tokens and the seconds that they take; the last part ends the output.
    """

    def __init__(self, clock: VirtualClock, box: Mailbox, *parts: tuple[tuple[int, ...], float]) -> None:
        self.complete = self.deliver = self
        self.requests: list[GenerateRequest] = []
        self.error: Exception | None = RayActorError()
        """What a part but the last ends with; None: its call ends like the last one's."""
        self._clock = clock
        self._parts = list(parts)
        self._mailbox = box

    def remote(self, request: GenerateRequest, *address: str) -> Any:
        self.requests.append(request)
        return self._play(request)

    async def _play(self, request: GenerateRequest) -> OutputChunk:
        token_ids, seconds = self._parts.pop(0)
        await self._clock.sleep(seconds)
        end = None if self._parts else FinishReason.LENGTH
        chunk = OutputChunk(request.request_id, token_ids, finish_reason=end, checkpoint="model")
        if token_ids or end:
            self._mailbox.put([chunk])
        # The caller takes the chunks that have arrived.
        await self._clock.sleep(0.01)
        if end is None and self.error is not None:
            raise self.error
        return chunk


def play(
    request: GenerateRequest, *parts: tuple[tuple[int, ...], float], **scripted: Any
) -> tuple[list[OutputChunk], Mortals]:
    """Chunks that a caller gets, and the deployment that was asked."""
    clock, box = VirtualClock(), mailbox()
    handle: Any = Mortals(clock, box, *parts)
    vars(handle).update(scripted)
    client = ServeRouterClient(handle, timeout_s=100, mailbox=box, clock=clock)

    async def main() -> list[OutputChunk]:
        return [chunk async for chunk in client.stream(request)]

    try:
        return clock.run(main()), handle
    finally:
        for asked in handle.requests:
            box.open(asked.request_id)  # Their ids are free: nothing of them is left.


def test_a_stream_whose_routers_die_goes_on_elsewhere_after_what_had_come() -> None:
    chunks, asked = play(REQUEST, ((1, 2), 1.0), ((3,), 20.0), ((), 1.0), ((4, 5), 1.0))
    assert sum((chunk.token_ids for chunk in chunks), ()) == (1, 2, 3, 4, 5)
    assert [request.resumed for request in asked.requests] == [
        None,
        Resumption((1, 2), "model"),
        Resumption((1, 2, 3), "model"),
        Resumption((1, 2, 3), "model"),
    ]
    assert len({request.request_id for request in asked.requests}) == 4
    assert {request.prompt_token_ids for request in asked.requests} == {(1,)}


def test_the_time_to_the_first_token_is_that_of_the_router_that_wrote_it() -> None:
    chunks, _ = play(REQUEST, ((1, 2), 1.0), ((3,), 20.0))
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert chunks[-1].ttft_s == 1.0


def test_a_stream_that_ends_router_after_router_is_ended() -> None:
    """Each router sends a token, which restarts the time limit."""
    with pytest.raises(EngineLostError, match="the request may be sent again"):
        play(REQUEST, *[((1,), 1.0)] * 7)
    chunks, _ = play(REQUEST, *[((1,), 1.0)] * 6)
    assert sum((chunk.token_ids for chunk in chunks), ()) == (1,) * 6


def test_a_request_is_not_longer_under_way_for_being_resumed() -> None:
    hurried = replace(REQUEST, timeout_s=10.0)
    _, asked = play(hurried, ((1,), 4.0), ((2,), 1.0), ((3,), 1.0))
    timeouts = [request.timeout_s for request in asked.requests]
    assert timeouts == [10.0, pytest.approx(5.74), pytest.approx(4.48)]
    with pytest.raises(EngineLostError, match="the request may be sent again"):
        play(hurried, ((1,), 9.9), ((2,), 1.0))


@pytest.mark.parametrize("call", [_whole, _streamed])
def test_a_request_that_has_brought_nothing_goes_to_the_next_router_under_a_new_id(call: Any) -> None:
    clock, box = VirtualClock(), mailbox()
    handle: Any = Mortals(clock, box, ((), 0.0), ((), 0.0), ((1, 2), 0.0))
    client = ServeRouterClient(handle, timeout_s=60, mailbox=box, clock=clock)
    assert clock.run(call(client)) == (1, 2)
    assert len({request.request_id for request in handle.requests}) == 3
    assert {request.prompt_token_ids for request in handle.requests} == {(1,)}
    assert 0.5 <= clock.monotonic() < 0.6


def test_a_call_that_ends_without_the_last_chunk_is_resumed() -> None:
    chunks, asked = play(REQUEST, ((1,), 0.0), ((), 0.0), error=None)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        ((1,), None),
        ((), FinishReason.LENGTH),
    ]
    assert asked.requests[1].resumed == Resumption((1,), "model")


@pytest.mark.parametrize("call", [_whole, _streamed])
def test_routers_that_go_on_dying_are_an_error_that_may_be_retried(call: Any) -> None:
    clock, box = VirtualClock(), mailbox()
    handle: Any = Mortals(clock, box, *[((), 0.0)] * 1000)
    client = ServeRouterClient(handle, timeout_s=60, mailbox=box, clock=clock)
    with pytest.raises(EngineLostError, match="the request may be sent again"):
        clock.run(call(client))
    assert 5.0 < clock.monotonic() <= 5.5
