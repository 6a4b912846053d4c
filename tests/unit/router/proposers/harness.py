"""Targets whose output repeats itself or does not, and what drafts without a model make of it."""

from __future__ import annotations

import asyncio
from typing import Any

from specray.fakes import FakeTarget, ToyModel, VirtualClock
from specray.fakes.engines import fake_info
from specray.requests import GenerateRequest, OutputChunk
from tests.unit.router.harness import Pair, in_virtual_time, serving

REPEATING = ToyModel(vocab_size=8, context_len=1)
"""A model whose output goes round in a circle after at most 8 tokens, so that lookups succeed."""
CHANGING = ToyModel()
"""A model whose output does not repeat itself: what is looked up is wrong."""


def target_of(model: ToyModel, rows_s: float = 0.0, max_num_seqs: int = 64) -> FakeTarget:
    """A target of 20 ms per step and ``rows_s`` per row."""
    info = fake_info("target", vocab_size=64, max_num_seqs=max_num_seqs)
    return FakeTarget(model, info=info, cost=lambda rows: int((0.020 + rows_s * rows) * 1e9))


def truth(model: ToyModel, given: GenerateRequest) -> tuple[int, ...]:
    seed = 0 if given.sampling.is_greedy else given.sampling.seed
    return model.generate(given.prompt_token_ids, given.max_tokens, seed)


def of_source(pair: Pair, source: str) -> tuple[float, float, float]:
    """(rounds with draft tokens, draft tokens, accepted ones) of a source."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, tokens, accepted = (
        pair.counted(f"specray_spec_decode_{name}_by_source_total", source=source) for name in names
    )
    return drafts, tokens, accepted


@in_virtual_time
async def serve_and_ask(
    clock: VirtualClock, model: ToyModel, given: list[GenerateRequest], **options: Any
) -> tuple[list[OutputChunk], Pair]:
    """All requests at once on a router of their own."""
    target = options.pop("target", None) or target_of(model)
    async with serving(clock, target=target, **options) as pair:
        outputs = list(await asyncio.gather(*(pair.router.complete(each) for each in given)))
        await pair.settle()
        return outputs, pair
