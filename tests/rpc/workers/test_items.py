"""Items of routers and the replies to them: batches, order, equal names, and what is released when."""

from __future__ import annotations

import asyncio

import pytest

from specray.draft_tokens import DraftTokens
from specray.interfaces import Drafter, Verifier
from specray.rpc.channel import ChannelOptions
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.types import (
    DraftReplies,
    DraftReply,
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
    speculate,
    verify,
)
from tests.rpc.workers.harness import (
    DEADLINE_S,
    ask,
    drafters,
    entered,
    serving_draft,
    serving_target,
    within,
)


async def test_draft_proposes_over_the_stream(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address) as [drafter]:
        seam: Drafter = drafter
        assert seam.info == DRAFT_INFO
        replies = await ask(drafter, speculate("a", round_id=4, token_ids=(1, 2, 3), k=2))
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


@pytest.mark.slow
async def test_waiting_requests_of_all_routers_become_one_draft_call(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address, 2) as [one, two]:
        # Wait for an answer first: the server would not begin to read the stream while the engine is blocked.
        for router in (one, two):
            await ask(router, speculate("opening"))
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
            seen.append(await ask(drafter, item))
        assert seen[1] == seen[2] == seen[3]
        assert engine.sequences == {"a": (1, 2, 3, 4, 5)}


async def test_equal_request_ids_of_two_routers_never_mix(address: str) -> None:
    engine = ScriptedDraft()
    async with serving_draft(engine, address), drafters(address, 2) as [one, two]:

        async def check(router: GrpcDrafter, reply: DraftReply, *token_ids: int) -> None:
            item = speculate("a", round_id=reply.round_id, base_len=reply.base_len, token_ids=token_ids)
            replies = await ask(router, item)
            assert replies.replies == (reply,)
            assert (replies.forward_ns == 0) is isinstance(reply, UnknownSequence)

        await check(one, Proposal("a", 0, 0, DraftTokens((4, 5))), 1, 2, 3)
        await check(two, UnknownSequence("a", 5, 3), 9)
        await two.release(["a"])
        await check(one, Proposal("a", 1, 3, DraftTokens((5, 6))), 4)
        await check(two, Proposal("a", 6, 0, DraftTokens((21, 22))), 20)
        await check(one, Proposal("a", 2, 4, DraftTokens((6, 7))), 5)


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
        await ask(drafter, speculate("a"), speculate("b"))
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
        await ask(one, speculate("a"), speculate("b"), speculate("c"))
        await one.release(["b"])
        await ask(two, speculate("c"), speculate("d"))
        await one.close()
        await eventually(lambda: "a" not in engine.sequences)
        assert set(engine.sequences) == {"c~1", "d"}
        assert engine.releases == [("b",), ("a", "c")]


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
