"""The sink: chunks of many requests leave together, first and last at once, and its end is everybody's."""

from __future__ import annotations

import asyncio

import pytest

from specray.errors import EngineLostError
from specray.fakes import VirtualClock
from specray.requests import FinishReason, OutputChunk
from specray.router.output.delivery import Delivery
from specray.router.output.stream_sink import StreamSink
from tests.unit.router.harness import expected, request, serving

INTERVAL_S = 0.020


async def batch_now(sink: StreamSink) -> list[OutputChunk] | None:
    """What leaves without any time passing; None: nothing."""
    taker = asyncio.ensure_future(sink.batch())
    for _ in range(5):
        await asyncio.sleep(0)
    if taker.done():
        return taker.result()
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    return None


async def test_what_one_step_brings_leaves_as_one_batch_in_order(clock: VirtualClock) -> None:
    sink = StreamSink(clock, INTERVAL_S)
    first, second = sink.open("a"), sink.open("b")
    second.push([7], ())
    first.push([1, 2], ())
    second.push([8], ())
    assert await batch_now(sink) == [OutputChunk("b", (7, 8)), OutputChunk("a", (1, 2))]


async def test_later_chunks_wait_for_the_interval_and_first_and_last_ones_do_not(clock: VirtualClock) -> None:
    sink = StreamSink(clock, INTERVAL_S)
    one, other = sink.open("a"), sink.open("b")
    one.push([1], ())
    await sink.batch()
    one.push([2], ())
    assert await batch_now(sink) is None
    # The other's first takes along what is there.
    other.push([9], ())
    assert await batch_now(sink) == [OutputChunk("a", (2,)), OutputChunk("b", (9,))]
    one.push([3], ())
    assert await sink.batch() == [OutputChunk("a", (3,))]
    assert clock.monotonic() == pytest.approx(INTERVAL_S)
    other.push([10], ())
    other.finish(FinishReason.LENGTH)
    assert await batch_now(sink) == [OutputChunk("b", (10,), finish_reason=FinishReason.LENGTH)]


async def test_an_outlet_that_fails_ends_everybody_who_waits_for_it(clock: VirtualClock) -> None:
    sink = StreamSink(clock, INTERVAL_S)
    waits = asyncio.ensure_future(sink.wait_ended(sink.open("a")))
    takes = asyncio.ensure_future(sink.batch())
    await asyncio.sleep(0)
    sink.fail(EngineLostError("the ingress has gone"))
    sink.fail(EngineLostError("and again"))
    for task in (waits, takes):
        with pytest.raises(EngineLostError, match="the ingress has gone"):
            await task


async def test_a_request_that_failed_sends_no_chunk_and_raises_where_it_is_waited_for(
    clock: VirtualClock,
) -> None:
    sink = StreamSink(clock, INTERVAL_S)
    failed, other = sink.open("a"), sink.open("b")
    failed.push([1], ())
    failed.fail(EngineLostError("the target was lost"))
    other.push([2], ())
    assert await batch_now(sink) == [OutputChunk("b", (2,))]
    with pytest.raises(EngineLostError, match="the target was lost"):
        await sink.wait_ended(failed)


async def take_all(sink: StreamSink, into: Delivery) -> None:
    while not into.is_ended:
        for chunk in await sink.batch():
            into.put(chunk)


async def test_the_router_delivers_the_whole_output_through_an_outlet(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        sink, received = StreamSink(clock, INTERVAL_S), Delivery("a", is_stream=False)
        taker = asyncio.ensure_future(take_all(sink, received))
        await pair.router.deliver(request(), sink)
        await taker
        chunk = await received.whole()
        assert chunk.token_ids == expected(request())
        assert chunk.finish_reason is FinishReason.LENGTH


async def test_a_request_whose_outlet_fails_is_aborted(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        sink = StreamSink(clock, INTERVAL_S)
        call = asyncio.ensure_future(pair.router.deliver(request(max_tokens=1000), sink))
        await sink.batch()
        sink.fail(EngineLostError("the ingress has gone"))
        with pytest.raises(EngineLostError, match="the ingress has gone"):
            await call
        # Its id is free again at once.
        assert (await pair.router.complete(request(max_tokens=2))).token_ids == expected(
            request(max_tokens=2)
        )
