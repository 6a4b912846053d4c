"""Routers and one worker over a real socket, with scripted engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.errors import ConfigError, EngineLostError, ProtocolError
from specray.interfaces import Drafter, Verifier
from specray.rpc.channel import ChannelOptions
from specray.rpc.codec import engine as codec
from specray.rpc.codec.engine import RequestBatch
from specray.rpc.connections.drafter import GrpcDrafter
from specray.rpc.connections.verifier import GrpcVerifier
from specray.rpc.role import DRAFT, TARGET, bind_draft, bind_target
from specray.rpc.workers.engine_host import EngineHost
from specray.rpc.workers.server import draft_server
from specray.rpc.workers.worker import EngineServerThread
from specray.types import (
    DraftReplies,
    DraftTokens,
    ItemFailed,
    Proposal,
    SpeculateItem,
    TargetReplies,
    UnknownSequence,
    Verdict,
)
from tests.rpc.engines import (
    DRAFT_INFO,
    TARGET_INFO,
    ScriptedDraft,
    ScriptedTarget,
    eventually,
    is_there,
    speculate,
    verify,
)

DEADLINE_S = 10.0
ResultT = TypeVar("ResultT")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def serving_draft(
    engine: ScriptedDraft, address: str, **options: Any
) -> AsyncIterator[EngineServerThread]:
    server = EngineServerThread(lambda: engine, role="draft", address=address, **options)
    async with running(server, engine):
        yield server


@asynccontextmanager
async def serving_target(
    engine: ScriptedTarget, address: str, **options: Any
) -> AsyncIterator[EngineServerThread]:
    server = EngineServerThread(lambda: engine, role="target", address=address, **options)
    async with running(server, engine):
        yield server


@asynccontextmanager
async def running(server: EngineServerThread, engine: ScriptedDraft | ScriptedTarget) -> AsyncIterator[None]:
    """Runs a server on a loop of its own, since a test may block the engine at its gate."""
    await asyncio.to_thread(server.start, timeout_s=DEADLINE_S)
    try:
        yield
    finally:
        engine.gate.set()
        await asyncio.to_thread(server.stop, grace_s=1.0)


async def check(server: EngineServerThread, *, timeout_s: float = DEADLINE_S) -> None:
    await asyncio.to_thread(server.check, timeout_s=timeout_s)


@asynccontextmanager
async def drafters(address: str, count: int = 1) -> AsyncIterator[list[GrpcDrafter]]:
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
            stack.push_async_callback(connection.close)
            connections.append(connection)
        yield connections


async def within(awaitable: Awaitable[ResultT]) -> ResultT:
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def entered(engine: ScriptedDraft | ScriptedTarget) -> None:
    assert await asyncio.to_thread(engine.entered.acquire, timeout=DEADLINE_S)


async def test_draft_proposes_over_the_stream(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        seam: Drafter = drafter
        assert seam.info == DRAFT_INFO
        await drafter.speculate([speculate("a", round_id=4, token_ids=(1, 2, 3), k=2)])
        replies = await within(drafter.replies())
        assert replies == DraftReplies((Proposal("a", 4, 0, DraftTokens((4, 5))),), forward_ns=1001)


async def test_target_verifies_a_request_as_one_step_with_one_reply_per_item(address: str) -> None:
    engine = ScriptedTarget()
    async with serving_target(engine, address):
        verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
        seam: Verifier = verifier
        assert seam.info == TARGET_INFO
        await verifier.verify(
            [verify("a", draft=(4, 5, 9)), verify("b"), verify("c", base_len=0, token_ids=())]
        )
        replies = await within(verifier.replies())
        assert replies == TargetReplies(
            (
                Verdict("a", 0, 0, 2, 6),
                Verdict("b", 0, 0, 0, 4),
                ItemFailed("c", 0, 0, "nothing to do", is_retriable=False),
            ),
            forward_ns=2003,
            # Rows as the engine reports them, without those it had computed before.
            num_rows=106,
        )
        await verifier.verify([verify("zzz", round_id=8, base_len=5)])
        replies = await within(verifier.replies())
        assert replies == TargetReplies((UnknownSequence("zzz", 8, 5),), forward_ns=0)
        await verifier.close()


async def test_engine_lives_on_one_thread_which_is_not_its_owners(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address) as server, drafters(address) as [drafter]:
        for round_id in range(3):
            await drafter.speculate([speculate("a", round_id=round_id)])
            await within(drafter.replies())
        await drafter.release(["a"])
        await check(server)
        assert engine.num_closed == 0
    assert engine.num_closed == 1
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_waiting_requests_of_all_routers_become_one_draft_call(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address, 2) as [one, two]:
        # Wait for an answer first: the server would not begin to read the stream while the engine is blocked.
        for router in (one, two):
            await router.speculate([speculate("opening")])
            await within(router.replies())
            await entered(engine)
        engine.calls.clear()
        engine.gate.clear()
        await one.speculate([speculate("first")])
        await entered(engine)
        await one.speculate([speculate("a"), speculate("b")])
        await two.speculate([speculate("c", token_ids=(10,))])
        await asyncio.sleep(1.0)
        engine.gate.set()
        got_one = [await within(one.replies()) for _ in range(2)]
        got_two = await within(two.replies())
    assert engine.calls[0] == ("first",)
    assert sorted(engine.calls[1]) == ["a", "b", "c"]
    assert len(engine.calls) == 2
    assert {reply.request_id for reply in got_one[1].replies} == {"a", "b"}
    assert got_two == DraftReplies((Proposal("c", 0, 0, DraftTokens((11, 12))),), forward_ns=1003)


async def test_waiting_requests_of_a_target_stay_steps_in_order(address: str) -> None:
    engine = ScriptedTarget()
    async with serving_target(engine, address):
        verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
        engine.gate.clear()
        for request_id in "abc":
            await verifier.verify([verify(request_id)])
        await asyncio.sleep(0.1)
        engine.gate.set()
        for _ in "abc":
            await within(verifier.replies())
        await verifier.close()
    assert engine.calls == [("a",), ("b",), ("c",)]


async def test_two_items_of_one_sequence_are_never_in_one_call(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        engine.gate.clear()
        await drafter.speculate([speculate("first")])
        await entered(engine)
        await drafter.speculate([speculate("a", token_ids=(1, 2, 3))])
        await drafter.speculate([speculate("a", round_id=1, base_len=3, token_ids=(7,))])
        engine.gate.set()
        got = [await within(drafter.replies()) for _ in range(3)]
    assert engine.calls == [("first",), ("a",), ("a",)]
    assert [reply.replies for reply in got[1:]] == [
        (Proposal("a", 0, 0, DraftTokens((4, 5))),),
        (Proposal("a", 1, 3, DraftTokens((8, 9))),),
    ]


async def test_replayed_item_is_harmless(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        items = [speculate("a"), speculate("a", round_id=1, base_len=3, token_ids=(4, 5))]
        seen = []
        for item in (items[0], items[1], items[1], items[1]):
            await drafter.speculate([item])
            seen.append(await within(drafter.replies()))
        assert seen[1] == seen[2] == seen[3]
        assert engine.sequences == {"a": (1, 2, 3, 4, 5)}


async def test_equal_request_ids_of_two_routers_never_mix(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address, 2) as [one, two]:
        await one.speculate([speculate("a", token_ids=(1, 2, 3))])
        await within(one.replies())
        await two.speculate([speculate("a", round_id=5, base_len=3, token_ids=(9,))])
        assert await within(two.replies()) == DraftReplies((UnknownSequence("a", 5, 3),), 0)
        await two.release(["a"])
        await one.speculate([speculate("a", round_id=1, base_len=3, token_ids=(4,))])
        assert (await within(one.replies())).replies == (Proposal("a", 1, 3, DraftTokens((5, 6))),)
        await two.speculate([speculate("a", round_id=6, token_ids=(20,))])
        assert (await within(two.replies())).replies == (Proposal("a", 6, 0, DraftTokens((21, 22))),)
        await one.speculate([speculate("a", round_id=2, base_len=4, token_ids=(5,))])
        assert (await within(one.replies())).replies == (Proposal("a", 2, 4, DraftTokens((6, 7))),)


async def test_release_is_in_order_with_the_items_of_its_stream(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        engine.gate.clear()
        await drafter.speculate([speculate("first")])
        await entered(engine)
        await drafter.speculate([speculate("a")])
        await drafter.release(["a", "never-seen"])
        await drafter.speculate([speculate("a", round_id=1, base_len=3, token_ids=(4,))])
        engine.gate.set()
        got = [await within(drafter.replies()) for _ in range(3)]
        assert set(engine.sequences) == {"first"}
    assert got[1].replies == (Proposal("a", 0, 0, DraftTokens((4, 5))),)
    assert got[2].replies == (UnknownSequence("a", 1, 3),)
    assert engine.releases[0] == ("a",)


async def test_what_is_freed_with_a_batch_is_freed_before_its_items(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        await drafter.speculate([speculate("a"), speculate("b")])
        await within(drafter.replies())
        # A name may be used again in the message that frees it.
        again = speculate("a", round_id=1, token_ids=(7,))
        await drafter.speculate([again], ["a", "b"])
        assert (await within(drafter.replies())).replies == (Proposal("a", 1, 0, DraftTokens((8, 9))),)
        assert engine.sequences == {"a": (7,)}
    assert engine.releases[0] == ("a", "b")
    engine = ScriptedTarget()
    async with serving_target(engine, address):
        verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
        await verifier.verify([verify("a")])
        await within(verifier.replies())
        await verifier.verify([verify("b")], ["a"])
        await within(verifier.replies())
        assert set(engine.sequences) == {"b"}
        await verifier.close()


async def test_stream_end_releases_what_the_stream_holds_and_nothing_else(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address, 2) as [one, two]:
        await one.speculate([speculate("a"), speculate("b"), speculate("c")])
        await within(one.replies())
        await one.release(["b"])
        await two.speculate([speculate("c"), speculate("d")])
        await within(two.replies())
        await one.close()
        await eventually(lambda: "a" not in engine.sequences)
        assert set(engine.sequences) == {"c~1", "d"}
        assert engine.releases == [("b",), ("a", "c")]


@dataclass(eq=False)
class ScriptedStream:
    is_open: bool = True
    got: list[tuple[Any, int]] = field(default_factory=list)
    has_got: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, replies: Any, num_requests: int) -> None:
        self.got.append((replies, num_requests))
        self.has_got.set()


async def test_items_of_a_closed_stream_are_not_computed() -> None:
    engine = ScriptedDraft()
    host = EngineHost(DRAFT, lambda: bind_draft(engine), on_broken=lambda error: None)
    host.start()
    gone, waiting = ScriptedStream(is_open=False), ScriptedStream()
    host.submit(gone, RequestBatch((speculate("late"),), ()))
    host.submit(waiting, RequestBatch((speculate("a"),), ()))
    host.end_stream(gone)
    await host.check()
    assert engine.calls == [("a",)]
    assert gone.got == []
    assert [replies.replies for replies, _ in waiting.got if replies is not None] == [
        (Proposal("a", 0, 0, DraftTokens((4, 5))),)
    ]


async def test_a_reply_leaves_before_the_next_step_begins() -> None:
    engine = ScriptedTarget()
    host = EngineHost(TARGET, lambda: bind_target(engine), on_broken=lambda error: None)
    host.start()
    seen: list[int] = []
    stream = ScriptedStream()

    async def write() -> None:
        await stream.has_got.wait()
        seen.append(len(engine.calls))

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    for request_id in "abc":
        host.submit(stream, RequestBatch((verify(request_id),), ()))
    await host.check()
    await within(writer)
    assert seen == [1]
    assert engine.calls == [("a",), ("b",), ("c",)]


async def test_a_stopped_engine_is_closed_once_and_answers_nothing_more() -> None:
    engine = ScriptedDraft()
    host = EngineHost(DRAFT, lambda: bind_draft(engine), on_broken=lambda error: None)
    host.start()
    checking = asyncio.create_task(host.check())
    await asyncio.sleep(0)
    host.stop()
    host.stop()
    with pytest.raises(EngineLostError, match="the draft engine was stopped"):
        await within(checking)
    stream = ScriptedStream()
    host.submit(stream, RequestBatch((speculate("a"),), ()))
    with pytest.raises(EngineLostError, match="the draft engine does not run"):
        await host.check()
    assert (engine.num_closed, engine.calls, stream.got) == (1, [], [])


async def test_a_failing_call_fails_only_the_item_that_causes_it(address: str) -> None:
    engine = ScriptedDraft()
    engine.poison = "bad"
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        await drafter.speculate([speculate("a"), speculate("bad"), speculate("c")])
        replies = await within(drafter.replies())
        assert replies.replies == (
            Proposal("a", 0, 0, DraftTokens((4, 5))),
            ItemFailed("bad", 0, 0, "the draft engine failed on this request", is_retriable=False),
            Proposal("c", 0, 0, DraftTokens((4, 5))),
        )
        assert engine.releases == [("bad",)]
        await drafter.speculate([speculate("d")])
        assert (await within(drafter.replies())).replies == (Proposal("d", 0, 0, DraftTokens((4, 5))),)


async def test_a_call_that_failed_is_no_step_of_so_many_rows(address: str) -> None:
    engine = ScriptedTarget()
    engine.poison = "bad"
    async with serving_target(engine, address):
        verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
        await verifier.verify([verify("a"), verify("bad")])
        replies = await within(verifier.replies())
        assert [reply.request_id for reply in replies.replies] == ["a", "bad"]
        assert replies.num_rows is None
        await verifier.verify([verify("b")])
        assert (await within(verifier.replies())).num_rows == 103
        await verifier.close()


async def test_an_item_that_the_engine_forgets_is_answered_all_the_same(address: str) -> None:
    engine = ScriptedDraft()
    engine.silent = "mute"
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        await drafter.speculate([speculate("mute"), speculate("a")])
        replies = await within(drafter.replies())
    assert replies.replies == (
        Proposal("a", 0, 0, DraftTokens((4, 5))),
        ItemFailed("mute", 0, 0, "the draft engine failed on this request", is_retriable=False),
    )


async def test_a_broken_engine_ends_streams_and_stops_serving(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address) as server, drafters(address) as [drafter]:
        engine.is_broken = True
        await drafter.speculate([speculate("a")])
        with pytest.raises(EngineLostError, match=r"INTERNAL.*engine is broken"):
            await within(drafter.replies())
        with pytest.raises(EngineLostError, match="engine is broken"):
            await drafter.speculate([speculate("a")])
        assert str(await within(asyncio.to_thread(server.wait_broken))) == (
            "the draft engine is broken: RuntimeError"
        )
        with pytest.raises(EngineLostError, match="engine is broken: RuntimeError"):
            await check(server)
        assert await health(address, "") == NOT_SERVING
        assert await health(address, "specray.v1.DraftService") == NOT_SERVING
        with pytest.raises(EngineLostError, match="INTERNAL"):
            await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)


async def test_check_that_fails_breaks_the_worker(address: str) -> None:
    engine = ScriptedTarget()
    async with serving_target(engine, address) as server:
        await check(server)
        engine.is_broken = True
        with pytest.raises(EngineLostError, match="target engine is broken: RuntimeError"):
            await check(server)
        await eventually(lambda: not server.is_alive)


async def test_check_of_a_hanging_engine_ends_at_its_deadline(address: str) -> None:
    engine = ScriptedTarget()
    async with serving_target(engine, address) as server:
        engine.gate.clear()
        with pytest.raises(EngineLostError, match=r"did not end a step within 0\.05 s"):
            await check(server, timeout_s=0.05)


async def health(address: str, service: str) -> int:
    async with aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        return int(response.status)


async def test_health_is_per_service_and_not_serving_on_stop(address: str, socket_path: Path) -> None:
    engine = ScriptedDraft()
    server = draft_server(lambda: engine, address)
    await server.start()
    assert await health(address, "") == SERVING
    assert await health(address, "specray.v1.DraftService") == SERVING
    with pytest.raises(aio.AioRpcError) as caught:
        await health(address, "specray.v1.TargetService")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    async with aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert (await within(watch.read())).status == SERVING
        stopping = asyncio.create_task(server.stop(0.2))
        assert (await within(watch.read())).status == NOT_SERVING
        await stopping
    assert not is_there(socket_path)
    await server.stop()


async def test_stop_answers_what_is_in_hand_then_ends_the_stream(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address) as server, drafters(address) as [drafter]:
        engine.gate.clear()
        await drafter.speculate([speculate("a")])
        await entered(engine)
        stopping = asyncio.create_task(asyncio.to_thread(server.stop, grace_s=DEADLINE_S))
        await asyncio.sleep(0.1)
        engine.gate.set()
        assert (await within(drafter.replies())).replies == (Proposal("a", 0, 0, DraftTokens((4, 5))),)
        with pytest.raises(EngineLostError, match="UNAVAILABLE: the worker is stopping"):
            await within(drafter.replies())
        await within(stopping)


async def test_broken_bytes_end_the_stream_with_invalid_argument(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/specray.v1.DraftService/Speculate", None, None)()
        await call.write(b"\xff\xff")
        with pytest.raises(aio.AioRpcError) as caught:
            await within(call.read())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "SpeculateRequest" in (caught.value.details() or "")


async def test_half_close_gets_its_replies_before_the_end(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/specray.v1.DraftService/Speculate", None, None)()
        await call.write(codec.encode_speculate_request([speculate("a")], ()))
        await call.done_writing()
        assert codec.decode_draft_replies(await call.read()).replies == (
            Proposal("a", 0, 0, DraftTokens((4, 5))),
        )
        assert await within(call.read()) is aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await eventually(lambda: engine.releases == [("a",)])


async def test_a_router_that_does_not_wait_is_held_back(address: str) -> None:
    engine = ScriptedTarget()
    async with serving_target(engine, address, max_pending=2):
        verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S, send_timeout_s=0.3)
        engine.gate.clear()
        big = tuple(range(100_000, 120_000))
        with pytest.raises(EngineLostError, match=r"took nothing for 0\.3 s"):
            for request_id in range(1000):
                await verifier.verify([verify(str(request_id), token_ids=big)])
        assert len(engine.calls) <= 2
        with pytest.raises(EngineLostError):
            await within(verifier.replies())
        await verifier.close()


async def test_giving_up_on_replies_ends_the_connection_and_frees_what_it_held(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        await drafter.speculate([speculate("a")])
        await within(drafter.replies())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(drafter.replies(), 0.02)
        with pytest.raises(EngineLostError, match="the stream was cancelled"):
            await drafter.speculate([speculate("a")])
        await eventually(lambda: engine.releases == [("a",)])


async def test_replies_that_nobody_took_yet_are_not_lost(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        for round_id in range(10):
            await drafter.speculate([speculate("a", round_id=round_id)])
            await eventually(lambda n=round_id: len(engine.calls) > n)
        rounds = [(await within(drafter.replies())).replies[0].round_id for _ in range(10)]
    assert rounds == list(range(10))


async def test_close_wakes_a_pending_replies_and_is_idempotent(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        pending = asyncio.create_task(drafter.replies())
        await asyncio.sleep(0.02)
        assert not pending.done()
        await drafter.close()
        await drafter.close()
        with pytest.raises(EngineLostError, match="closed"):
            await within(pending)
        for call in (drafter.replies(), drafter.speculate([speculate("a")]), drafter.release(["a"])):
            with pytest.raises(EngineLostError, match="closed"):
                await within(call)


async def test_nobody_listens_is_engine_lost_at_once_or_at_the_deadline(address: str) -> None:
    with pytest.raises(EngineLostError, match="UNAVAILABLE"):
        await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
    with pytest.raises(EngineLostError, match=r"DEADLINE_EXCEEDED|no answer within 0\.1 s"):
        await GrpcDrafter.connect(address, timeout_s=0.1, wait_for_ready=True)


async def test_a_peer_that_accepts_and_says_nothing_is_lost_at_the_deadline(socket_path: Path) -> None:
    quiet = await asyncio.start_unix_server(lambda reader, writer: None, str(socket_path))
    try:
        with pytest.raises(EngineLostError):
            await GrpcDrafter.connect(f"unix:{socket_path}", timeout_s=0.2)
    finally:
        quiet.close()


async def test_wait_for_ready_waits_for_a_worker_that_comes_up(address: str) -> None:
    connecting = asyncio.create_task(GrpcDrafter.connect(address, timeout_s=DEADLINE_S, wait_for_ready=True))
    await asyncio.sleep(0.1)
    async with serving_draft(ScriptedDraft(), address):
        drafter = await within(connecting)
        await drafter.close()


async def test_wrong_version_and_wrong_role_are_refused(address: str) -> None:
    async with serving_draft(ScriptedDraft(replace(DRAFT_INFO, protocol_version=99)), address):
        with pytest.raises(ProtocolError, match="speaks protocol version 99; needed: 1"):
            await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
        with pytest.raises(ConfigError, match=r"serves no specray\.v1\.TargetService"):
            await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
    server = draft_server(lambda: ScriptedDraft(TARGET_INFO), address)
    with pytest.raises(ConfigError, match="the engine is a 'target'; needed: 'draft'"):
        await server.start()


async def test_an_engine_that_cannot_be_built_is_the_error_of_start(address: str, socket_path: Path) -> None:
    def fail() -> ScriptedDraft:
        raise ConfigError("target.model is 'nowhere'; no such directory")

    server = draft_server(fail, address)
    with pytest.raises(ConfigError, match="nowhere"):
        await server.start()
    assert not is_there(socket_path)
    assert not server.is_serving


class Partition:
    """A TCP forwarder that can go silent without closing connections, like a lost network."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.rsplit(":", 1)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return "127.0.0.1:" + str(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._is_open.clear()

    def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, sink)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._is_open.wait()
            sink.write(data)
            await sink.drain()
        sink.close()


async def test_partition_is_noticed_by_keepalive_on_both_sides() -> None:
    engine = ScriptedDraft()
    options = ChannelOptions(keepalive_time_s=0.1, keepalive_timeout_s=0.2)
    async with serving_draft(engine, "127.0.0.1:0", options=options) as server:
        partition = Partition(server.address)
        drafter = await GrpcDrafter.connect(await partition.start(), timeout_s=DEADLINE_S, options=options)
        await drafter.speculate([speculate("a")])
        await within(drafter.replies())
        partition.cut()
        with pytest.raises(EngineLostError, match="ping timeout"):
            await within(drafter.replies())
        await eventually(lambda: engine.releases == [("a",)])
        await drafter.close()
        partition.stop()


async def test_pings_of_an_idle_connection_do_not_end_it(address: str) -> None:
    engine = ScriptedDraft()
    options = ChannelOptions(keepalive_time_s=0.05, keepalive_timeout_s=DEADLINE_S)
    async with serving_draft(engine, address, options=options):
        drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S, options=options)
        await asyncio.sleep(0.5)
        assert not drafter.is_lost
        await drafter.speculate([speculate("a")])
        await within(drafter.replies())
        await drafter.close()


async def test_many_items_both_ways(address: str) -> None:
    engine = ScriptedDraft()
    items: list[SpeculateItem] = [speculate(f"r{i}", token_ids=tuple(range(2000))) for i in range(64)]
    options = ChannelOptions()
    async with serving_draft(engine, address, options=options), drafters(address) as [drafter]:
        await drafter.speculate(items)
        answered: list[str] = []
        while len(answered) < len(items):
            answered += [reply.request_id for reply in (await within(drafter.replies())).replies]
        assert answered == [f"r{i}" for i in range(64)]
