"""Tests of proposals at each place of an output: what the draft proposes, and where it stops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest

from specray.bench.proposals import BOUNDS, WrittenOutput, read_proposals
from specray.draft_tokens import DraftTokens
from specray.engine_info import EngineInfo
from specray.errors import EngineLostError
from specray.fakes import FakeDraft, NoisyGuesser, ToyModel
from specray.fakes.engines import fake_info
from specray.types import DraftReplies, ItemFailed, Proposal, SamplingParams, SpeculateItem

MODEL = ToyModel()
CHANCE = 0.5
"""Probability of each further token in this draft's view."""


class UnsureDrafter:
    """interfaces.Drafter: a fake draft that ends a proposal whose tokens together are too unlikely."""

    def __init__(self, agreement: float) -> None:
        self.engine = FakeDraft(NoisyGuesser(MODEL, agreement))
        self.num_asked: list[int] = []
        self._replies: deque[DraftReplies] = deque()

    @property
    def info(self) -> EngineInfo:
        return fake_info("draft")

    async def fetch_info(self) -> EngineInfo:
        return self.info

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        self.num_asked.append(len(items))
        answered = self.engine.speculate(items).replies
        # Each reply comes by itself: they need not come together.
        self._replies.extend(
            DraftReplies((self._cut(item, reply),), 0)
            for item, reply in zip(items, answered, strict=True)
            if isinstance(reply, Proposal)
        )

    def _cut(self, item: SpeculateItem, reply: Proposal) -> Proposal:
        length = 1
        while length < item.num_speculative_tokens and CHANCE ** (length + 1) >= item.min_acceptance:
            length += 1
        return Proposal(
            reply.request_id, reply.round_id, reply.base_len, DraftTokens(reply.draft.token_ids[:length])
        )

    async def replies(self) -> DraftReplies:
        return self._replies.popleft()

    async def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    async def close(self) -> None:
        pass


def written(first: int, num_tokens: int) -> WrittenOutput:
    prompt = (first, 9, first)
    return WrittenOutput(prompt, MODEL.generate(prompt, num_tokens), SamplingParams(num_prompt_tokens=3))


def test_every_place_tells_whether_the_draft_was_right_and_where_it_ends() -> None:
    drafter = UnsureDrafter(agreement=0.6)
    outputs = [written(1, 40), written(2, 25)]
    measured = asyncio.run(read_proposals(drafter, outputs))
    for output, one in zip(outputs, measured, strict=True):
        guesser = NoisyGuesser(MODEL, 0.6)
        right = [
            guesser.ranked((*output.prompt, *output.tokens[:place]), 0, 1) == (token,)
            for place, token in enumerate(output.tokens)
        ]
        assert one.agreements == "".join("01"[is_right] for is_right in right)
        # 0.5^4 is more than 0.05, 0.5^3 more than 0.12, 0.5^2 just 0.25; the first token is always there.
        lengths = {each.min_acceptance: each.by_position for each in one.lengths}
        digits = dict(zip(BOUNDS, "432111", strict=True))
        assert lengths == {bound: digit * len(output.tokens) for bound, digit in digits.items()}
    assert 0 < measured[0].agreements.count("1") < 40
    # Both are asked side by side until the shorter one is at its end; the draft is left empty.
    assert drafter.num_asked == ([2] * 25 + [1] * 15) * len(BOUNDS)
    assert not drafter.engine.held_request_ids


def test_tokens_are_kept_as_which_are_equal_and_no_more() -> None:
    output = WrittenOutput((50, 9, 50), (9, 7, 50), SamplingParams(num_prompt_tokens=3))
    (one,) = asyncio.run(read_proposals(UnsureDrafter(0.5), [output]))
    assert (one.prompt, one.tokens) == ((1, 2, 1), (2, 3, 1))


def test_many_outputs_are_read_a_few_at_a_time_in_their_order() -> None:
    drafter = UnsureDrafter(agreement=1.0)
    measured = asyncio.run(read_proposals(drafter, [written(n, 1 + n % 3) for n in range(20)]))
    assert [one.agreements for one in measured] == ["1" * (1 + n % 3) for n in range(20)]
    assert max(drafter.num_asked) == 16


def test_draft_that_refuses_is_an_error() -> None:
    class Refusing(UnsureDrafter):
        async def replies(self) -> DraftReplies:
            return DraftReplies((ItemFailed("output-0.05-0", 1, 0, "no room", is_retriable=True),), 0)

    with pytest.raises(EngineLostError, match="refused to propose: ItemFailed"):
        asyncio.run(read_proposals(Refusing(0.5), [written(1, 2)]))
