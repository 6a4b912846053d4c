"""The thread of an engine: what it computes, when replies leave, and what fails with it."""

from __future__ import annotations

import asyncio

import pytest

from specray.draft_tokens import DraftTokens
from specray.errors import EngineLostError
from specray.rpc.codec.values import RequestBatch
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.rpc.role import DRAFT, TARGET, bind_draft, bind_target
from specray.rpc.workers.engine_host import EngineHost
from specray.types import ItemFailed, Proposal
from tests.rpc.engines import ScriptedDraft, ScriptedTarget, speculate, verify
from tests.rpc.workers.harness import (
    DEADLINE_S,
    NOT_SERVING,
    ScriptedStream,
    ask,
    check,
    drafters,
    health,
    serving_draft,
    serving_target,
    within,
)


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
    assert gone.num_deliveries == 0
    assert [replies.replies for replies in waiting.got] == [(Proposal("a", 0, 0, DraftTokens((4, 5))),)]


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
    assert (engine.num_closed, engine.calls, stream.num_deliveries) == (1, [], 0)


async def test_a_failing_call_fails_only_the_item_that_causes_it(address: str) -> None:
    engine = ScriptedDraft()
    engine.poison = "bad"
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        replies = await ask(drafter, speculate("a"), speculate("bad"), speculate("c"))
        assert replies.replies == (
            Proposal("a", 0, 0, DraftTokens((4, 5))),
            ItemFailed("bad", 0, 0, "the draft engine failed on this request", is_retriable=False),
            Proposal("c", 0, 0, DraftTokens((4, 5))),
        )
        assert engine.releases == [("bad",)]
        assert (await ask(drafter, speculate("d"))).replies == (Proposal("d", 0, 0, DraftTokens((4, 5))),)


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
        replies = await ask(drafter, speculate("mute"), speculate("a"))
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
