"""Choice of a draft among those that Serve's replicas offer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from specray.actors.drafts.deployment import DraftLease
from specray.actors.drafts.source import ServeDrafterSource
from specray.errors import EngineLostError
from specray.interfaces import DrafterPool
from specray.rpc.connection import GrpcDrafter
from specray.rpc.workers.server import engine_server
from tests.rpc.engines import DRAFT_INFO, ScriptedDraft

DEADLINE_S = 10.0
HANGS = object()

Answer = DraftLease | Exception | object


class Handle:
    """A Serve handle whose calls are answered by its replicas in turn."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = list(answers)
        self.asked: list[asyncio.Future[DraftLease]] = []

    @property
    def lease(self) -> Handle:
        return self

    def remote(self) -> asyncio.Future[DraftLease]:
        future: asyncio.Future[DraftLease] = asyncio.get_running_loop().create_future()
        answer = self._answers[len(self.asked) % len(self._answers)]
        if isinstance(answer, DraftLease):
            future.set_result(answer)
        elif isinstance(answer, Exception):
            future.set_exception(answer)
        self.asked.append(future)
        return future


def offer(address: str, num_routers: int = 0, busy_share: float = 0.0) -> DraftLease:
    return DraftLease("r", "n", 1, address, num_routers=num_routers, busy_share=busy_share)


def source(*answers: Answer, timeout_s: float = DEADLINE_S) -> tuple[ServeDrafterSource, Handle]:
    handle = Handle(answers)
    loop = asyncio.get_running_loop()
    return ServeDrafterSource(cast(Any, handle), serve_loop=loop, timeout_s=timeout_s), handle


@asynccontextmanager
async def drafts(address: str, count: int = 2) -> AsyncIterator[list[str]]:
    """Drafts whose models are named by their addresses."""
    names = [f"{address}.{number}" for number in range(count)]
    engines = [ScriptedDraft(replace(DRAFT_INFO, model=name)) for name in names]
    servers = [
        engine_server(partial(lambda engine: engine, engine), role="draft", address=name)
        for engine, name in zip(engines, names, strict=True)
    ]
    addresses = [await server.start() for server in servers]
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(0.1)


async def leased(pool: ServeDrafterSource) -> str:
    drafter = await pool.lease()
    await drafter.close()
    return drafter.info.model


@pytest.mark.parametrize(
    "loads", [[(2, 0.0), (1, 0.9)], [(1, 0.5), (1, 0.1)]], ids=["fewest routers", "of equals, the least busy"]
)
async def test_least_loaded_draft_is_taken(address: str, loads: list[tuple[int, float]]) -> None:
    async with drafts(address) as addresses:
        pool, handle = source(
            *(offer(*each) for each in zip(addresses, *zip(*loads, strict=True), strict=True))
        )
        assert isinstance(pool, DrafterPool)
        assert await leased(pool) == addresses[1]
        assert len(handle.asked) == 4


async def test_draft_that_hangs_is_not_waited_for(address: str) -> None:
    async with drafts(address, 1) as [there]:
        pool, handle = source(HANGS, offer(there))
        async with asyncio.timeout(DEADLINE_S / 2):
            assert await leased(pool) == there
        assert [future.cancelled() for future in handle.asked] == [True, False, True, False]


async def test_draft_that_is_gone_gives_way_to_the_next_best(address: str) -> None:
    async with drafts(address, 1) as [there]:
        pool, _ = source(offer(f"{address}.gone"), offer(there, num_routers=3))
        assert await leased(pool) == there


async def test_no_draft_is_said_so(address: str) -> None:
    pool, _ = source(DeploymentUnavailableError(cast(Any, "Draft")))
    with pytest.raises(EngineLostError, match="no draft can be leased"):
        await pool.lease()
    pool, handle = source(HANGS, timeout_s=0.05)
    with pytest.raises(EngineLostError, match=r"no draft could be leased within 0\.05 s"):
        await pool.lease()
    await asyncio.sleep(0)
    assert all(future.cancelled() for future in handle.asked)


@pytest.mark.parametrize(("num_others", "moves"), [(1, False), (2, True), (5, True)])
async def test_router_moves_where_at_least_two_fewer_are(address: str, num_others: int, moves: bool) -> None:
    async with drafts(address) as [here, there]:
        others = [await GrpcDrafter.connect(here, timeout_s=DEADLINE_S) for _ in range(num_others)]
        # ``others[0]`` stands for this router's own connection.
        pool, _ = source(offer(here, num_routers=num_others), offer(there))
        better = await pool.lease_better(others[0])
        assert (better is not None) == moves
        for drafter in (*others, *([better] if better is not None else [])):
            await drafter.close()


async def test_only_draft_there_is_is_kept(address: str) -> None:
    async with drafts(address, 1) as [here]:
        connections = [await GrpcDrafter.connect(here, timeout_s=DEADLINE_S) for _ in range(3)]
        pool, _ = source(offer(here, num_routers=3))
        assert await pool.lease_better(connections[0]) is None
        for drafter in connections:
            await drafter.close()
