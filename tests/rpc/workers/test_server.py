"""A worker's life: its engine's thread, its health, its checks and its stop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.draft_tokens import DraftTokens
from specray.errors import ConfigError, EngineLostError
from specray.rpc.workers.server import engine_server
from specray.types import Proposal
from tests.rpc.engines import ScriptedDraft, ScriptedTarget, eventually, is_there, speculate
from tests.rpc.workers.harness import (
    DEADLINE_S,
    NOT_SERVING,
    SERVING,
    ask,
    check,
    drafters,
    entered,
    health,
    serving_draft,
    serving_target,
    within,
)


async def test_engine_lives_on_one_thread_which_is_not_its_owners(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address) as server, drafters(address) as [drafter]:
        for round_id in range(3):
            await ask(drafter, speculate("a", round_id=round_id))
        await drafter.release(["a"])
        await check(server)
        assert engine.num_closed == 0
    assert engine.num_closed == 1
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


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
        assert server.is_alive


async def test_health_is_per_service_and_not_serving_on_stop(address: str, socket_path: Path) -> None:
    engine = ScriptedDraft()
    server = engine_server(lambda: engine, role="draft", address=address)
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


async def test_an_engine_that_cannot_be_built_is_the_error_of_start(address: str, socket_path: Path) -> None:
    def fail() -> ScriptedDraft:
        raise ConfigError("target.model is 'nowhere'; no such directory")

    server = engine_server(fail, role="draft", address=address)
    with pytest.raises(ConfigError, match="nowhere"):
        await server.start()
    assert not is_there(socket_path)
    assert not server.is_serving
