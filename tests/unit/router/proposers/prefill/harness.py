"""Engines that note what they are given while the draft reads long prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from specray.engine_info import StepTime
from specray.fakes import FakeDraft, FakeTarget, PerfectGuesser
from specray.requests import GenerateRequest
from specray.types import DraftReplies, SpeculateItem, TargetReplies, VerifyItem
from tests.unit.router.harness import (
    DRAFT_STEP_S,
    MODEL,
    TARGET_S,
    Pair,
    expected,
    fake_draft,
    fake_target,
)

LONG = tuple((7 * index) % 61 for index in range(300))
TOKEN_S = 0.0001
"""The draft reads 160 tokens in the time of a target step."""
SIZES = (1, 512)


class RecordingDraft(FakeDraft):
    """Takes time for what it reads, and notes the items of every call."""

    def __init__(self, *, token_s: float = TOKEN_S) -> None:
        step_times = tuple(StepTime(size, DRAFT_STEP_S + token_s * (size - 1)) for size in SIZES)
        super().__init__(PerfectGuesser(MODEL), info=replace(fake_draft().info, step_times=step_times))
        self.token_s = token_s
        self.calls: list[tuple[SpeculateItem, ...]] = []
        self.unanswered = ""
        """A request whose next item is read and not answered."""

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.calls.append(tuple(items))
        replies = super().speculate(items).replies
        num_tokens = sum(len(item.token_ids) for item in items)
        steps = max(item.num_speculative_tokens + bool(item.fanout) for item in items)
        if any(item.request_id == self.unanswered for item in items):
            replies = tuple(reply for reply in replies if reply.request_id != self.unanswered)
            self.unanswered = ""
        return DraftReplies(replies, int(1e9 * (steps * DRAFT_STEP_S + self.token_s * num_tokens)))

    def told(self, request_id: str) -> list[tuple[int, int, bool]]:
        """Of its items: (base_len, tokens, is a piece)."""
        items = [item for call in self.calls for item in call if item.request_id == request_id]
        return [(item.base_len, len(item.token_ids), item.is_prefill_chunk) for item in items]

    @property
    def num_pieces(self) -> int:
        return sum(item.is_prefill_chunk for call in self.calls for item in call)


class RecordingTarget(FakeTarget):
    """20 ms a step; notes the draft tokens of every round of each request."""

    def __init__(self) -> None:
        step_times = tuple(StepTime(size, TARGET_S) for size in SIZES)
        info = replace(fake_target().info, step_times=step_times)
        super().__init__(MODEL, info=info, cost=lambda rows: int(TARGET_S * 1e9))
        self.num_drafts: dict[str, list[int]] = {}

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        for item in items:
            if item.sample:
                self.num_drafts.setdefault(item.request_id, []).append(len(item.draft.token_ids))
        return super().verify(items)


async def complete(pair: Pair, *given: GenerateRequest) -> None:
    """All at once; every output is the target's alone."""
    outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
    assert [output.token_ids for output in outputs] == [expected(each) for each in given]


async def until_piece(draft: RecordingDraft, number: int) -> None:
    """Until the draft was given so many pieces."""
    for _ in range(5000):
        if draft.num_pieces >= number:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"the draft was given {draft.num_pieces} pieces")
