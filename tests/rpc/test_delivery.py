"""The stream that carries chunks from a router to an ingress, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from specray.actors.mailbox import Mailbox
from specray.actors.stream_sinks import StreamSinks
from specray.errors import EngineLostError, ProtocolError
from specray.requests import FinishReason, OutputChunk, SpeculationStats
from specray.round_reports import EngineStep, RoundReport
from specray.router.transport.clock import SystemClock
from specray.rpc.channel import ChannelOptions
from specray.rpc.codec.delivery import decode_chunks, encode_chunks
from specray.rpc.delivery import ACCEPTED, DELIVERY_SERVICE, DeliveryConnection, DeliveryServer
from specray.rpc.pb import delivery_pb2
from specray.rpc.security import PeerSecurity
from specray.types import TokenLogprobs
from tests.rpc.strategies import F32, built, tuples_of

DEADLINE_S = 10.0

SMALL = st.integers(0, 2**31 - 1)
IDS = st.lists(SMALL, max_size=4).map(tuple)
SECONDS = st.floats(0, 60)
LOGPROBS = tuples_of(st.builds(TokenLogprobs, SMALL, F32), max_size=2)
STEPS = st.builds(EngineStep, SECONDS, SECONDS, SECONDS)
ROUNDS = built(
    RoundReport,
    token_ids=IDS,
    draft_token_ids=IDS,
    verify=STEPS,
    drafting=tuples_of(STEPS, max_size=2),
    draft_parents=st.none() | st.lists(st.integers(-1, 63), min_size=1, max_size=4).map(tuple),
    draft_probs=tuples_of(st.floats(0, 1)),
)
COMMON = {
    "request_id": st.text(min_size=1, max_size=8),
    "token_ids": IDS,
    "rounds": tuples_of(ROUNDS, max_size=2),
}
OPEN_CHUNKS = st.builds(OutputChunk, **COMMON, logprobs=LOGPROBS)
LAST_CHUNKS = st.builds(
    OutputChunk,
    **COMMON,
    finish_reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]),
    stop_reason=st.none() | st.text(max_size=4) | SMALL,
    stats=st.none() | built(SpeculationStats, acceptance_histogram=st.just((1, 2))),
    num_cached_tokens=SMALL,
    ttft_s=st.none() | SECONDS,
    prompt_logprobs=LOGPROBS,
)


@pytest.mark.slow
@given(st.lists(OPEN_CHUNKS | LAST_CHUNKS, max_size=4))
def test_chunks_come_back_as_they_were_sent(chunks: list[OutputChunk]) -> None:
    assert decode_chunks(encode_chunks(chunks)) == chunks


def test_an_unknown_finish_reason_is_refused() -> None:
    message = delivery_pb2.DeliverRequest()
    message.chunks.add(request_id="a").finish_reason = 9  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match=r"finish_reason is 9; allowed: 0\.\.3"):
        decode_chunks(message.SerializeToString())


@asynccontextmanager
async def mailbox_at(address: str, options: ChannelOptions | None = None) -> AsyncIterator[Mailbox]:
    mailbox = Mailbox(address, options=options)
    await mailbox.start()
    try:
        yield mailbox
    finally:
        await mailbox.stop()


def stream_sinks(options: ChannelOptions | None = None) -> StreamSinks:
    return StreamSinks(SystemClock(), interval_s=0.0, options=options or ChannelOptions())


@pytest.mark.parametrize("host", ["unix", "tcp"])
async def test_chunks_reach_the_mailbox_of_their_request_and_no_other(host: str, address: str) -> None:
    async with (
        mailbox_at(address if host == "unix" else "127.0.0.1:0") as mailbox,
        asyncio.timeout(DEADLINE_S),
    ):
        sinks = stream_sinks()
        sink = sinks.to(mailbox.address)
        assert sinks.to(mailbox.address) is sink
        received = mailbox.open("a")
        sent, stranger = sink.open("a"), sink.open("b")
        stranger.push([5], ())
        stranger.finish(FinishReason.LENGTH)
        sent.push([1, 2], ())
        sent.finish(FinishReason.STOP, stop_reason="end")
        await sink.wait_ended(sent)
        assert await received.whole() == OutputChunk("a", (1, 2), (), FinishReason.STOP, "end")
        await sinks.close()


@pytest.mark.slow
async def test_an_ingress_that_ends_fails_its_requests_and_the_next_one_connects_anew(address: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        sinks = stream_sinks()
        async with mailbox_at(address) as mailbox:
            received = mailbox.open("a")
            sink = sinks.to(mailbox.address)
            delivery = sink.open("a")
            delivery.push([1], ())
            await anext(received.chunks(SystemClock(), 0))
        with pytest.raises(EngineLostError, match="ingress at unix:"):
            await sink.wait_ended(delivery)
        async with mailbox_at(address) as mailbox:
            assert sinks.to(mailbox.address) is not sink
        await sinks.close()


async def test_an_ingress_that_cannot_be_reached_fails_the_request(address: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        sinks = stream_sinks()
        sink = sinks.to(address)
        with pytest.raises(EngineLostError, match="UNAVAILABLE"):
            await sink.wait_ended(sink.open("a"))
        await sinks.close()


async def test_a_peer_without_the_secret_delivers_nothing(address: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    guarded = ChannelOptions(security=PeerSecurity(secret_file=str(secret)))
    taken: asyncio.Queue[Sequence[OutputChunk]] = asyncio.Queue()
    server = DeliveryServer(taken.put_nowait, address, options=guarded)
    await server.start()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineLostError, match="UNAUTHENTICATED"):
            await DeliveryConnection.connect(server.address, timeout_s=DEADLINE_S)
        connection = await DeliveryConnection.connect(server.address, timeout_s=DEADLINE_S, options=guarded)
        await connection.send([OutputChunk("a", (1,))])
        assert await taken.get() == [OutputChunk("a", (1,))]
        await connection.close()
    await server.stop()


@asynccontextmanager
async def deaf_ingress_at(address: str) -> AsyncIterator[None]:
    """An ingress that admits routers and reads nothing."""

    async def accept(_: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        await context.send_initial_metadata(((ACCEPTED, "1"),))
        await asyncio.Event().wait()

    deliver: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(accept)
    server = aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(DELIVERY_SERVICE, {"Deliver": deliver}),)
    )
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@pytest.mark.slow
async def test_closing_fails_a_send_under_way_and_does_not_cancel_who_sends(address: str) -> None:
    async with deaf_ingress_at(address), asyncio.timeout(DEADLINE_S):
        connection = await DeliveryConnection.connect(address, timeout_s=DEADLINE_S)
        num_sent = 0

        async def send_all() -> None:
            nonlocal num_sent
            while True:
                await connection.send([OutputChunk("a", tuple(range(100_000)))])
                num_sent += 1

        sending = asyncio.create_task(send_all())
        before = -1
        while num_sent != before:
            before = num_sent
            await asyncio.sleep(0.1)
        await connection.close()
        with pytest.raises(EngineLostError) as caught:
            await sending
        assert str(caught.value) == f"ingress at {address}: the call was cancelled"


async def test_broken_bytes_end_the_stream_and_say_why(address: str) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        mailbox_at(address) as mailbox,
        aio.insecure_channel(mailbox.address) as channel,
    ):
        call = channel.stream_stream("/specray.v1.DeliveryService/Deliver", None, None)()
        await call.initial_metadata()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "DeliverRequest" in str(await call.details())
