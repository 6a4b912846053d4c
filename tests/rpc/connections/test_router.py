"""The real router, the real wire, engines without tensors: the tokens are the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.config import SpeculationConfig
from specray.control.cost_model import TargetTimes
from specray.errors import EngineLostError
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser
from specray.interfaces import Drafter
from specray.requests import GenerateRequest
from specray.router import Router
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.rpc.workers.server import engine_server
from specray.types import Overlap, SamplingParams, TargetReplies, VerifyItem
from tests.rpc.engines import eventually

DEADLINE_S = 30.0
NUM_TOKENS = 200


class Leases:
    """A draft at a fixed address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.num_leased = 0

    async def lease(self) -> Drafter:
        drafter = await GrpcDrafter.connect(self._address, timeout_s=DEADLINE_S)
        self.num_leased += 1
        return drafter


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [Overlap.SERIAL, Overlap.AHEAD, Overlap.ENUMERATE])
@pytest.mark.parametrize("draft_dies", [False, True])
async def test_router_over_grpc_gives_the_targets_own_tokens(
    overlap: Overlap, draft_dies: bool, address: str
) -> None:
    target = FakeTarget()
    draft = FakeDraft(NoisyGuesser(target.model, 0.6))
    verify_server = engine_server(lambda: target, role="target", address=address + ".t")
    speculate_server = engine_server(lambda: draft, role="draft", address=address + ".d")
    await verify_server.start()
    await speculate_server.start()
    leases = Leases(address + ".d")
    router = Router(
        await GrpcVerifier.connect(address + ".t", timeout_s=DEADLINE_S),
        leases,
        speculation=SpeculationConfig.model_validate({"overlap": overlap, "num_speculative_tokens": 3}),
    )
    await router.start()
    requests = [
        GenerateRequest(
            f"r{i}", (1, 2, 3 + i), SamplingParams(temperature=0.0, num_prompt_tokens=3), NUM_TOKENS
        )
        for i in range(4)
    ]
    answers = [asyncio.create_task(router.complete(request)) for request in requests]
    await eventually(lambda: leases.num_leased > 0 and target.num_steps > 5, timeout_s=DEADLINE_S)
    if draft_dies:
        await speculate_server.stop(0.0)
    async with asyncio.timeout(DEADLINE_S):
        chunks = await asyncio.gather(*answers)
    for request, chunk in zip(requests, chunks, strict=True):
        assert chunk.token_ids == target.model.generate(request.prompt_token_ids, NUM_TOKENS)
    if not draft_dies:
        assert all(chunk.stats is not None and chunk.stats.num_accepted_draft_tokens > 0 for chunk in chunks)
        await eventually(lambda: not draft.held_request_ids)
    await eventually(lambda: not target.held_request_ids)
    await router.stop()
    await verify_server.stop(1.0)
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
    server = engine_server(SevenRows, role="target", address=address)
    await server.start()
    verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
    router = Router(verifier, None, speculation=SpeculationConfig())
    await router.start()
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=3)
    async with asyncio.timeout(DEADLINE_S):
        await router.complete(GenerateRequest("a", (1, 2, 3), sampling, 5))
    assert learnt == 5 * [7]
    await router.stop()
    await server.stop(1.0)
