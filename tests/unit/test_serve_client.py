"""A router behind a Serve handle: what callers see of Ray's errors, and that no call is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from specray.actors.client import ServeRouterClient, translate
from specray.actors.mailbox import Mailbox
from specray.errors import EngineLostError, OverloadedError
from specray.fakes.clock import VirtualClock
from specray.requests import FinishReason, GenerateRequest, OutputChunk
from specray.types import SamplingParams


class Response:
    """A DeploymentResponse that never comes."""

    is_cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.sleep(60).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A DeploymentHandle whose every method is answered by one response."""

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
    """A Router deployment that plays a script into the mailbox."""

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
        self._mailbox._put(self._chunks)
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


async def test_a_router_that_dies_in_mid_stream_is_lost_after_what_had_come() -> None:
    box = mailbox()
    handle: Any = Deliveries(box, [OutputChunk("a", (1,))], RayActorError())
    stream = ServeRouterClient(handle, timeout_s=60, mailbox=box).stream(REQUEST)
    assert (await anext(stream)).token_ids == (1,)
    with pytest.raises(EngineLostError, match="the request may be sent again"):
        await anext(stream)


async def test_a_call_that_ends_without_the_last_chunk_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.actors.client.LAST_CHUNK_TIMEOUT_S", 0.01)
    box = mailbox()
    handle: Any = Deliveries(box, [OutputChunk("a", (1,))])
    stream = ServeRouterClient(handle, timeout_s=60, mailbox=box).stream(REQUEST)
    assert (await anext(stream)).token_ids == (1,)
    with pytest.raises(EngineLostError, match="the end of the output was lost"):
        await anext(stream)


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


class Deaths:
    """A Router deployment whose first calls find a dead replica."""

    def __init__(self, num_deaths: int, box: Mailbox) -> None:
        self.complete = self.deliver = self
        self.requests: list[GenerateRequest] = []
        self._num_deaths = num_deaths
        self._mailbox = box

    def remote(self, request: GenerateRequest, *address: str) -> Any:
        self.requests.append(request)
        return self._answer(request)

    async def _answer(self, request: GenerateRequest) -> OutputChunk:
        if len(self.requests) <= self._num_deaths:
            raise RayActorError()
        chunk = OutputChunk(request.request_id, (1, 2), finish_reason=FinishReason.LENGTH)
        self._mailbox._put([chunk])
        return chunk


async def _whole(client: ServeRouterClient) -> tuple[int, ...]:
    return (await client.complete(REQUEST)).token_ids


async def _streamed(client: ServeRouterClient) -> tuple[int, ...]:
    return sum([chunk.token_ids async for chunk in client.stream(REQUEST)], ())


@pytest.mark.parametrize("call", [_whole, _streamed])
def test_a_request_that_has_brought_nothing_goes_to_the_next_router_under_a_new_id(call: Any) -> None:
    clock, box = VirtualClock(), mailbox()
    handle: Any = Deaths(2, box)
    client = ServeRouterClient(handle, timeout_s=60, mailbox=box, clock=clock)
    assert clock.run(call(client)) == (1, 2)
    assert len({request.request_id for request in handle.requests}) == 3
    assert {request.prompt_token_ids for request in handle.requests} == {(1,)}
    assert clock.monotonic() == 0.5


@pytest.mark.parametrize("call", [_whole, _streamed])
def test_routers_that_go_on_dying_are_an_error_that_may_be_retried(call: Any) -> None:
    clock, box = VirtualClock(), mailbox()
    handle: Any = Deaths(1000, box)
    client = ServeRouterClient(handle, timeout_s=60, mailbox=box, clock=clock)
    with pytest.raises(EngineLostError, match="the request may be sent again"):
        clock.run(call(client))
    assert 5.0 < clock.monotonic() <= 5.5
