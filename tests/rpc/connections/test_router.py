"""The real router, the real wire, engines without tensors: the tokens are the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.control.target_times import TargetTimes
from specray.errors import EngineLostError
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser
from specray.rpc.workers.server import engine_server
from specray.types import Overlap, TargetReplies, VerifyItem
from tests.rpc.connections.harness import DEADLINE_S, NUM_TOKENS, Leases, request, router
from tests.rpc.engines import eventually


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [Overlap.SERIAL, Overlap.AHEAD, Overlap.ENUMERATE])
@pytest.mark.parametrize("draft_dies", [False, True])
async def test_router_over_grpc_gives_the_targets_own_tokens(
    overlap: Overlap, draft_dies: bool, address: str
) -> None:
    target = FakeTarget()
    draft = FakeDraft(NoisyGuesser(target.model, 0.6))
    speculate_server = engine_server(lambda: draft, role="draft", address=address + ".d")
    await speculate_server.start()
    leases = Leases(address + ".d")
    async with router(target, address + ".t", leases, overlap=overlap, fallback="ngram") as made:
        requests = [request(number) for number in range(4)]
        answers = [asyncio.create_task(made.complete(each)) for each in requests]
        await eventually(lambda: leases.num_leased > 0 and target.num_steps > 5, timeout_s=DEADLINE_S)
        if draft_dies:
            await speculate_server.stop(0.0)
        async with asyncio.timeout(DEADLINE_S):
            chunks = await asyncio.gather(*answers)
        for each, chunk in zip(requests, chunks, strict=True):
            assert chunk.token_ids == target.model.generate(each.prompt_token_ids, NUM_TOKENS)
        if not draft_dies:
            assert all(chunk.stats and chunk.stats.num_accepted_draft_tokens > 0 for chunk in chunks)
            await eventually(lambda: not draft.held_request_ids)
        await eventually(lambda: not target.held_request_ids)
    await speculate_server.stop(1.0)
    with pytest.raises(EngineLostError):
        await leases.lease()


class SevenRows(FakeTarget):
    """A target that reports seven rows for every step."""

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        return replace(super().verify(items), num_rows=7)


async def test_the_router_learns_what_a_step_took_by_the_rows_that_the_engine_computed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router sends accepted draft tokens again, so its own count would differ."""
    learnt: list[int] = []
    monkeypatch.setattr(
        TargetTimes, "add", lambda times, num_rows, seconds, **others: learnt.append(num_rows)
    )
    async with router(SevenRows(), address, None) as made, asyncio.timeout(DEADLINE_S):
        await made.complete(replace(request(0), max_tokens=5))
    assert learnt == 5 * [7]
