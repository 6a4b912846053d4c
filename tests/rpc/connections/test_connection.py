"""Errors of a caller whose connection is closed or gets malformed answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc import aio

from specray.config import SpeculationConfig
from specray.control.controller import Controller
from specray.errors import EngineLostError
from specray.interfaces import Drafter
from specray.router.transport import leases as leases_module
from specray.router.transport.clock import SystemClock
from specray.router.transport.leases import DraftLeases
from specray.router.transport.links import DraftLink, Inbox, current_info
from specray.rpc.codec.values import encode_info
from specray.rpc.connection import GrpcDrafter
from specray.rpc.role import DRAFT
from specray.telemetry.metrics import RouterMetrics
from tests.rpc.engines import DRAFT_INFO, TARGET_INFO, eventually

DEADLINE_S = 10.0
Context = aio.ServicerContext[bytes, bytes]


@dataclass
class SilentDraft:
    """A draft service that accepts streams and answers Info as scripted."""

    answer: bytes = encode_info(DRAFT.info_message, DRAFT_INFO)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    num_unanswered: int = 0

    async def info(self, _: bytes, __: Context) -> bytes:
        self.num_unanswered += 1
        try:
            await self.may_answer.wait()
        finally:
            self.num_unanswered -= 1
        return self.answer

    async def speculate(self, _: object, context: Context) -> None:
        await context.send_initial_metadata(())
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(address: str) -> AsyncIterator[SilentDraft]:
    draft = SilentDraft()
    draft.may_answer.set()
    speculate: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(draft.speculate)
    info: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(draft.info)
    server = aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "specray.v1.DraftService", {"Speculate": speculate, "GetDraftInfo": info}
            ),
        )
    )
    server.add_insecure_port(address)
    await server.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield draft
    finally:
        await server.stop(0)


async def connect(address: str) -> GrpcDrafter:
    return await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)


async def asked(draft: SilentDraft) -> None:
    await eventually(lambda: draft.num_unanswered == 1)


async def test_closing_fails_a_question_under_way_and_does_not_cancel_who_asks(address: str) -> None:
    async with serving(address) as draft:
        drafter = await connect(address)
        draft.may_answer.clear()
        asking = asyncio.create_task(drafter.fetch_info())
        await asked(draft)
        await drafter.close()
        with pytest.raises(EngineLostError) as caught:
            await asking
        assert str(caught.value) == f"draft at {address}: the connection was closed"


async def test_who_asks_and_is_cancelled_stays_cancelled_and_the_connection_stands(address: str) -> None:
    async with serving(address) as draft:
        drafter = await connect(address)
        draft.may_answer.clear()
        asking = asyncio.create_task(drafter.fetch_info())
        await asked(draft)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        draft.may_answer.set()
        assert await drafter.fetch_info() == DRAFT_INFO
        await drafter.close()


async def test_an_answer_that_breaks_the_protocol_is_a_lost_engine(address: str) -> None:
    async with serving(address) as draft:
        drafter = await connect(address)
        draft.answer = b"\xff\xff"
        with pytest.raises(EngineLostError, match=r"^draft at unix:.*DraftInfo"):
            await drafter.fetch_info()
        await drafter.close()


async def test_a_scrape_goes_on_without_the_engine_that_is_lost_meanwhile(address: str) -> None:
    async with serving(address) as draft:
        link = DraftLink(await connect(address), Inbox())
        draft.may_answer.clear()
        scrape = asyncio.create_task(current_info(link, SystemClock()))
        await asked(draft)
        await link.close(SystemClock())
        assert await scrape is None


class Pool:
    """interfaces.DrafterPool that asks the draft in use for its info, as the one over Serve does."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.num_asked = 0

    async def lease(self) -> Drafter:
        return await connect(self._address)

    async def lease_better(self, current: Drafter) -> Drafter | None:
        self.num_asked += 1
        await current.fetch_info()
        return None


async def test_a_better_draft_is_sought_on_after_the_one_that_was_asked_is_lost(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "REBALANCE_INTERVAL_S", 0.05)
    async with serving(address) as draft:
        pool = Pool(address)
        leases = DraftLeases(
            pool,
            TARGET_INFO,
            inbox=Inbox(),
            clock=SystemClock(),
            metrics=RouterMetrics(),
            rng=random.Random(0),
            controller=Controller(SpeculationConfig()),
        )
        await leases.start()
        draft.may_answer.clear()
        await asked(draft)
        hanging, num_asked = leases.link, pool.num_asked
        assert hanging is not None
        assert leases.lose(hanging)
        await eventually(lambda: draft.num_unanswered == 0)
        draft.may_answer.set()
        await eventually(lambda: pool.num_asked > num_asked)
        assert leases.link is not hanging
        await leases.close()
