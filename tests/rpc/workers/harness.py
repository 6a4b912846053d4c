"""A worker with a scripted engine over a real socket, its routers, and waits with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.rpc.connection import GrpcDrafter
from specray.rpc.workers.worker import EngineServerThread
from specray.types import DraftReplies, SpeculateItem
from tests.rpc.engines import ScriptedDraft, ScriptedTarget

DEADLINE_S = 10.0
ResultT = TypeVar("ResultT")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(eq=False)
class ScriptedStream:
    """A router's stream without gRPC, which stores replies."""

    is_open: bool = True
    num_deliveries: int = 0
    """Replies, and notices that an item needs none."""
    got: list[Any] = field(default_factory=list)
    has_got: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, replies: Any, num_requests: int) -> None:
        self.num_deliveries += 1
        if replies is not None:
            self.got.append(replies)
            self.has_got.set()


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


async def ask(drafter: GrpcDrafter, *items: SpeculateItem) -> DraftReplies:
    """The first message after the items were sent."""
    await drafter.speculate(items)
    return await within(drafter.replies())


async def within(awaitable: Awaitable[ResultT]) -> ResultT:
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def entered(engine: ScriptedDraft | ScriptedTarget) -> None:
    assert await asyncio.to_thread(engine.entered.acquire, timeout=DEADLINE_S)


async def health(address: str, service: str) -> int:
    async with aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        return int(response.status)
