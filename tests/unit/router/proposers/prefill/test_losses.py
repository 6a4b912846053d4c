"""What may get lost while the draft reads is read anew, and what has ended leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from specray.fakes import LocalDrafter, VirtualClock
from specray.router.draft_model.budgets import MIN_DRAFT_PREFILL_TOKENS
from tests.unit.router.harness import PROMPT, TARGET_S, request, router_config, serving
from tests.unit.router.proposers.prefill.harness import LONG, RecordingDraft, complete, until_piece


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
async def test_draft_lost_in_the_middle_of_reading_is_told_all_anew(
    clock: VirtualClock, overlap: str
) -> None:
    drafts = [RecordingDraft(), RecordingDraft()]
    config = router_config(prefill_chunk_tokens=64)
    async with serving(
        clock,
        make_drafter=lambda number: LocalDrafter(
            drafts[number], clock, dies_after=2 if number == 0 else None
        ),
        config=config,
        overlap=overlap,
        num_speculative_tokens=3,
    ) as pair:
        await complete(pair, request("a", LONG, max_tokens=60))
        assert drafts[0].told("a") == [(0, 64, True), (64, 64, True)]
        told = drafts[1].told("a")
        assert told[:4] == [(0, 64, True), (64, 64, True), (128, 64, True), (192, 64, True)]
        assert pair.counted("specray_spec_decode_num_accepted_tokens_total") > 20


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
async def test_sequence_evicted_in_the_middle_of_reading_is_told_anew(
    clock: VirtualClock, overlap: str
) -> None:
    draft = RecordingDraft()
    config = router_config(prefill_chunk_tokens=64)
    async with serving(clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3) as pair:
        call = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=60)))
        await until_piece(draft, 2)
        draft.forget("a")
        await call
        assert draft.told("a")[:5] == [
            (0, 64, True),
            (64, 64, True),
            (128, 64, True),
            (0, 64, True),
            (64, 64, True),
        ]
        assert pair.counted("specray_spec_decode_num_accepted_tokens_total") > 20


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
async def test_piece_whose_answer_was_lost_is_read_again_when_a_draft_would_be_given_up(
    clock: VirtualClock, overlap: str
) -> None:
    draft = RecordingDraft()
    config = router_config(prefill_chunk_tokens=128, round_timeout_s=0.3)
    async with serving(clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3) as pair:
        stream = asyncio.create_task(complete(pair, request("stream", PROMPT, max_tokens=400)))
        await asyncio.sleep(0.2)
        draft.unanswered = "a"
        given = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=60)))
        await until_piece(draft, 1)
        begun_s = clock.monotonic()
        await until_piece(draft, 2)
        assert 0.3 <= clock.monotonic() - begun_s < 0.3 + 3 * TARGET_S
        assert [base_len for base_len, _, _ in draft.told("a")] == [0, 0]
        await asyncio.gather(stream, given)
        assert pair.counted("specray_draft_lost_total") == 0


async def test_session_that_ends_while_it_is_read_leaves_nothing_behind(clock: VirtualClock) -> None:
    draft = RecordingDraft(token_s=0.001)
    config = router_config(prefill_chunk_tokens=256)
    async with serving(clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3) as pair:
        await complete(pair, request("a", LONG, max_tokens=2))
        assert draft.told("a") == [(0, 256, True)]
        # Its answer comes late, and the next prompt is not kept waiting for it.
        await complete(pair, request("b", LONG, max_tokens=30))
        assert draft.told("b")[0] == (0, 256, True)
        assert pair.counted("specray_late_replies_total", engine="draft") == 1
        await pair.settle()


async def test_long_text_that_is_read_anew_beside_others_ends_with_a_piece_and_not_with_a_question(
    clock: VirtualClock,
) -> None:
    """All would wait for what the last piece brings."""

    draft = RecordingDraft()
    async with serving(clock, draft=draft, overlap="serial", num_speculative_tokens=3) as pair:
        stream = asyncio.create_task(complete(pair, request("stream", PROMPT, max_tokens=200)))
        call = asyncio.create_task(complete(pair, request("a", LONG[:200], max_tokens=60)))
        await asyncio.sleep(0.3)
        draft.forget("a")
        begun = len(draft.told("a"))
        await asyncio.gather(stream, call)
        told = draft.told("a")[begun:]
        first = next(index for index, (base_len, _, _) in enumerate(told) if base_len == 0)
        (_, begin, _), (_, rest, is_prefill_chunk), (_, asked, is_other_piece) = told[first : first + 3]
        assert (begin, is_prefill_chunk, is_other_piece) == (128, True, False)
        assert rest > MIN_DRAFT_PREFILL_TOKENS
        assert asked <= 4
