"""Connections of routers to a worker: how they begin and end, what holds them back, lost networks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc import aio

from specray.draft_tokens import DraftTokens
from specray.errors import ConfigError, EngineLostError, ProtocolError
from specray.rpc.channel import ChannelOptions
from specray.rpc.codec import draft as draft_codec
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.rpc.workers.server import engine_server
from specray.types import Proposal
from tests.rpc.engines import (
    DRAFT_INFO,
    TARGET_INFO,
    ScriptedDraft,
    ScriptedTarget,
    eventually,
    speculate,
    verify,
)
from tests.rpc.workers.harness import DEADLINE_S, ask, drafters, serving_draft, serving_target, within


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
        await call.write(draft_codec.encode_speculate_request([speculate("a")], ()))
        await call.done_writing()
        assert draft_codec.decode_draft_replies(await call.read()).replies == (
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
        await ask(drafter, speculate("a"))
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


@pytest.mark.slow
async def test_wait_for_ready_waits_for_a_worker_that_comes_up(address: str) -> None:
    connecting = asyncio.create_task(GrpcDrafter.connect(address, timeout_s=DEADLINE_S, wait_for_ready=True))
    await asyncio.sleep(0.1)
    async with serving_draft(ScriptedDraft(), address):
        drafter = await within(connecting)
        await drafter.close()


async def test_wrong_version_and_wrong_role_are_refused(address: str) -> None:
    async with serving_draft(ScriptedDraft(replace(DRAFT_INFO, protocol_version=99)), address):
        with pytest.raises(ProtocolError, match="speaks protocol version 99; needed: 2"):
            await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
        with pytest.raises(ConfigError, match=r"serves no specray\.v1\.TargetService"):
            await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
    server = engine_server(lambda: ScriptedDraft(TARGET_INFO), role="draft", address=address)
    with pytest.raises(ConfigError, match="the engine is a 'target'; needed: 'draft'"):
        await server.start()


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
        await ask(drafter, speculate("a"))
        partition.cut()
        with pytest.raises(EngineLostError, match="ping timeout"):
            await within(drafter.replies())
        await eventually(lambda: engine.releases == [("a",)])
        await drafter.close()
        partition.stop()


@pytest.mark.slow
async def test_pings_of_an_idle_connection_do_not_end_it(address: str) -> None:
    engine = ScriptedDraft()
    options = ChannelOptions(keepalive_time_s=0.05, keepalive_timeout_s=DEADLINE_S)
    async with serving_draft(engine, address, options=options):
        drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S, options=options)
        await asyncio.sleep(0.5)
        assert not drafter.is_lost
        await ask(drafter, speculate("a"))
        await drafter.close()
