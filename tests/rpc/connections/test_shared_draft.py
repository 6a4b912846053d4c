"""Several routers on one draft, over a real socket: turns, names, places, and a draft that leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from specray.draft_tokens import DraftTokens
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser
from specray.fakes.engines import fake_info
from specray.interfaces import SyncDraftEngine
from specray.rpc.connection import GrpcDrafter
from specray.rpc.workers.server import EngineServer, engine_server
from specray.types import (
    DraftReplies,
    DraftReply,
    ItemFailed,
    Proposal,
    SpeculateItem,
    UnknownSequence,
)
from tests.rpc.connections.harness import DEADLINE_S, NUM_TOKENS, Leases, request, router
from tests.rpc.engines import DRAFT_INFO, ScriptedDraft, eventually, speculate


@asynccontextmanager
async def serving(
    engine: SyncDraftEngine, address: str, num_routers: int = 2
) -> AsyncIterator[tuple[EngineServer[SpeculateItem, DraftReplies], list[GrpcDrafter]]]:
    server = engine_server(lambda: engine, role="draft", address=address)
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0.5)
        drafters = []
        for _ in range(num_routers):
            drafters.append(await GrpcDrafter.connect(address, timeout_s=DEADLINE_S))
            stack.push_async_callback(drafters[-1].close)
        yield server, drafters


async def answers(drafter: GrpcDrafter, items: Sequence[SpeculateItem]) -> list[DraftReply]:
    """Collects the replies to all items, from any number of messages."""
    await drafter.speculate(items)
    got: list[DraftReply] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(got) < len(items):
            got += (await drafter.replies()).replies
    return got


class SlowDraft(ScriptedDraft):
    """A draft slow enough that items sent during a call arrive before the call after the next."""

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        time.sleep(0.03)
        return super().speculate(items)


@pytest.mark.slow
async def test_router_that_sends_much_lets_another_into_its_next_call(address: str) -> None:
    engine = SlowDraft()
    async with serving(engine, address) as (_, [greedy, modest]):
        # Both streams are open.
        await asyncio.gather(*(answers(one, [speculate("first")]) for one in (greedy, modest)))
        engine.calls.clear()
        long = tuple(range(27))
        many = asyncio.create_task(
            answers(greedy, [speculate(f"g{i}", token_ids=long, k=2) for i in range(40)])
        )
        # Wait until another router's items are queued.
        await eventually(lambda: bool(engine.calls))
        one = asyncio.create_task(answers(modest, [speculate("m")]))
        await many
        assert await one == [Proposal("m", 0, 0, DraftTokens((4, 5)))]
    assert max(len(call) for call in engine.calls) == 3, "64 tokens a call: two long items, and a short one"
    # It takes a moment to arrive, on a busy machine several calls; behind all others it would be in the last.
    place = next(number for number, call in enumerate(engine.calls) if "m" in call)
    assert place < len(engine.calls) - 1, "not after all that had come before"
    assert sum(map(len, engine.calls)) == 41


async def test_places_are_shared_and_who_gives_way_enters_again(address: str) -> None:
    engine = ScriptedDraft(replace(DRAFT_INFO, max_num_seqs=4))
    async with serving(engine, address) as (_, [greedy, modest]):
        await answers(greedy, [speculate(f"g{i}") for i in range(4)])
        await answers(greedy, [speculate("g0", round_id=1, base_len=3, token_ids=(4,))])
        assert await answers(modest, [speculate("m0"), speculate("m1"), speculate("m2")]) == [
            Proposal(f"m{i}", 0, 0, DraftTokens((4, 5))) for i in range(3)
        ]
        assert engine.releases == [("g1",), ("g2",)], "the least recently used, until both have two"
        assert await answers(greedy, [speculate("g0", round_id=2, base_len=4, token_ids=(5,))]) == [
            Proposal("g0", 2, 4, DraftTokens((6, 7)))
        ]
        gone = speculate("g1", round_id=1, base_len=3, token_ids=(4,))
        assert await answers(greedy, [gone]) == [UnknownSequence("g1", 1, 3)]
        again = speculate("g1", round_id=2, token_ids=(1, 2, 3, 4))
        assert await answers(greedy, [again]) == [Proposal("g1", 2, 0, DraftTokens((5, 6)))]


async def test_request_that_keeps_failing_is_refused_until_it_ends(address: str) -> None:
    engine = ScriptedDraft()
    engine.poison = "bad"
    async with serving(engine, address) as (_, [one, other]):
        for number in range(4):
            got = await answers(one, [speculate("bad", round_id=number), speculate("good", round_id=number)])
            assert [type(reply) for reply in sorted(got, key=lambda reply: reply.request_id)] == [
                ItemFailed,
                Proposal,
            ]
        num_crashes = sum("bad" in call for call in engine.calls)
        assert num_crashes == 4, "twice in company, twice alone"
        assert isinstance(got[0], ItemFailed) and got[0].message.startswith("refused")
        engine.poison = "\0"
        assert await answers(other, [speculate("bad")]) == [Proposal("bad", 0, 0, DraftTokens((4, 5)))]
        await one.release(["bad"])
        assert await answers(one, [speculate("bad", round_id=9)]) == [
            Proposal("bad", 9, 0, DraftTokens((4, 5)))
        ]


async def test_draft_says_how_many_routers_it_has(address: str) -> None:
    async with serving(ScriptedDraft(), address) as (server, [one, two]):
        assert (await one.fetch_info()).num_routers == server.num_routers == 2
        await two.close()
        await eventually(lambda: server.num_routers == 1)
        assert (await one.fetch_info()).num_routers == 1
        assert 0.0 <= (await one.fetch_info()).busy_share <= 1.0


async def test_draft_that_stops_tells_its_routers_and_serves_them_until_they_leave(address: str) -> None:
    async with serving(ScriptedDraft(), address) as (server, [one, two]):
        stopping = asyncio.create_task(server.stop(0.5, drain_s=DEADLINE_S))
        for drafter in (one, two):
            assert await asyncio.wait_for(drafter.replies(), DEADLINE_S) == DraftReplies((), 0, True)
        assert await answers(one, [speculate("a")]) == [Proposal("a", 0, 0, DraftTokens((4, 5)))]
        await one.close()
        assert not stopping.done()
        await two.close()
        async with asyncio.timeout(DEADLINE_S / 2):
            await stopping


@pytest.mark.slow
async def test_equal_requests_of_two_routers_share_a_draft_with_too_few_places(address: str) -> None:
    targets = [FakeTarget(), FakeTarget()]
    draft = FakeDraft(NoisyGuesser(targets[0].model, 0.6), info=fake_info("draft", max_num_seqs=4))
    async with serving(draft, address + ".d", num_routers=0), AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(router(target, f"{address}.{i}", Leases(address + ".d")))
            for i, target in enumerate(targets)
        ]
        requests = [request(number) for number in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            chunks = await asyncio.gather(*(each.complete(one) for each in routers for one in requests))
        for one, chunk in zip(requests * 2, chunks, strict=True):
            assert chunk.token_ids == targets[0].model.generate(one.prompt_token_ids, NUM_TOKENS)
        accepted = [chunk.stats.num_accepted_draft_tokens for chunk in chunks if chunk.stats is not None]
        assert sum(accepted[:4]) > 0 and sum(accepted[4:]) > 0, "neither router was shut out"
        await eventually(lambda: not draft.held_request_ids)


@pytest.mark.slow
async def test_router_leaves_a_draft_that_drains_without_losing_it(address: str) -> None:
    target = FakeTarget()
    drafts = [FakeDraft(NoisyGuesser(target.model, 0.6)) for _ in range(2)]
    async with (
        serving(drafts[0], address + ".0", num_routers=0) as (first, _),
        serving(drafts[1], address + ".1", num_routers=0),
        router(target, address + ".t", Leases(address + ".0", address + ".1")) as made,
    ):
        requests = [replace(request(number), max_tokens=2000) for number in range(2)]
        calls = [asyncio.create_task(made.complete(one)) for one in requests]
        await eventually(lambda: drafts[0].num_steps > 10)
        async with asyncio.timeout(DEADLINE_S):
            await first.stop(0.5, drain_s=DEADLINE_S)
            chunks = await asyncio.gather(*calls)
        for one, chunk in zip(requests, chunks, strict=True):
            assert chunk.token_ids == target.model.generate(one.prompt_token_ids, 2000)
        assert made.metrics.value("specray_draft_moves_total") == 1
        assert made.metrics.value("specray_draft_lost_total") == 0
        assert drafts[1].num_steps > 10
