"""What the draft was not told goes to it in pieces that stall nobody, of one prompt or of several."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specray.control.target_times import TargetTimes
from specray.fakes import LocalDrafter, VirtualClock
from specray.router.draft_model.budgets import MIN_DRAFT_PREFILL_TOKENS
from tests.pairwise import pairs
from tests.unit.router.harness import PROMPT, TARGET_S, request, router_config, serving
from tests.unit.router.proposers.prefill.harness import (
    LONG,
    TOKEN_S,
    RecordingDraft,
    RecordingTarget,
    complete,
    until_piece,
)

# One prompt


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
async def test_alone_a_prompt_goes_in_whole_chunks_and_the_last_with_a_question(
    clock: VirtualClock, overlap: str
) -> None:
    draft = RecordingDraft()
    config = router_config(prefill_chunk_tokens=128)
    async with serving(clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3) as pair:
        await complete(pair, request("a", LONG, max_tokens=12))
        assert draft.told("a")[:3] == [(0, 128, True), (128, 128, True), (256, 44, False)]
        assert draft.num_pieces == 2
        assert draft.calls[2][0].num_speculative_tokens == 3
        # What the draft said of the first token was found, and of every round after it.
        assert pair.counted("specray_spec_decode_num_accepted_tokens_total") >= 8
        await pair.settle()


@pairs(
    overlap=("serial", "ahead", "enumerate", "auto"),
    temperature=(0.0, 1.0),
    dies_after=(None, 2, 5),
    k=(3, "auto"),
)
async def test_output_is_the_targets_alone_however_it_is_read(
    clock: VirtualClock, overlap: str, temperature: float, dies_after: int | None, k: int | str
) -> None:
    draft = RecordingDraft()
    async with serving(
        clock,
        draft=draft,
        make_drafter=lambda _: LocalDrafter(draft, clock, dies_after=dies_after),
        config=router_config(prefill_chunk_tokens=32),
        overlap=overlap,
        num_speculative_tokens=k,
    ) as pair:
        prompts = [PROMPT, LONG, LONG[:31], LONG[:33], LONG[100:]]
        given = [
            request(str(index), prompt, 40, temperature=temperature, seed=index)
            for index, prompt in enumerate(prompts)
        ]
        await complete(pair, *given)
        assert draft.num_pieces > 10
        assert max(len(item.token_ids) for call in draft.calls for item in call) <= MIN_DRAFT_PREFILL_TOKENS
        accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
        assert accepted + pair.counted("specray_rounds_total") == 5 * 40
        if dies_after is None:
            assert accepted > 0
            await pair.settle()


async def test_nobody_waits_for_a_draft_that_is_still_reading(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 s of reading; meanwhile the target goes on at one token a step."""

    draft = RecordingDraft(token_s=0.010)
    target = RecordingTarget()
    config = router_config(prefill_chunk_tokens=64)
    async with serving(
        clock, target=target, draft=draft, config=config, overlap="serial", num_speculative_tokens=3
    ) as pair:
        controller = pair.router.controller
        kinds: list[bool] = []
        observe = controller.cost_model.target.add

        def record(*args: Any, has_prompt: bool, **options: Any) -> None:
            kinds.append(has_prompt)
            observe(*args, has_prompt=has_prompt, **options)

        monkeypatch.setattr(TargetTimes, "add", lambda _, *args, **options: record(*args, **options))
        await complete(pair, request("a", LONG, max_tokens=30))
        # A step beside which the draft reads says nothing of others.
        assert kinds == [True] * 34
        # Five steps for the prompt, the last of which gives a token.
        assert clock.monotonic() == pytest.approx(TARGET_S * (5 + 29))
        assert target.num_drafts["a"] == [0] * 30
        assert pair.counted("specray_outcomes_total") == 0


@pytest.mark.parametrize(
    ("overlap", "num_tokens", "round_s"),
    [("serial", 128, 0.029), ("enumerate", MIN_DRAFT_PREFILL_TOKENS, 0.021)],
)
async def test_others_are_drafted_for_in_every_round_while_a_prompt_is_read(
    clock: VirtualClock, overlap: str, num_tokens: int, round_s: float
) -> None:
    """As one call the prompt would take the draft 0.2 s. Pieces fit beside the target's step of 20 ms.

    In turns, rounds take 8 ms more. Where both overlap, the draft works for 12 of the 20 ms anyway.
    """

    draft, target = RecordingDraft(), RecordingTarget()
    config = router_config(prefill_chunk_tokens=2048)
    async with serving(
        clock, target=target, draft=draft, config=config, overlap=overlap, num_speculative_tokens=2
    ) as pair:
        stream = asyncio.create_task(complete(pair, request("stream", PROMPT, max_tokens=200)))
        await asyncio.sleep(0.3)
        prompt = tuple(LONG * 10)[:2000]
        reading = asyncio.create_task(complete(pair, request("prompt", prompt, max_tokens=100)))
        await until_piece(draft, 1)
        begun, begun_s = len(target.num_drafts["stream"]), clock.monotonic()
        await until_piece(draft, 11)
        rounds = target.num_drafts["stream"][begun:]
        assert rounds == [2] * 10
        assert clock.monotonic() - begun_s <= 10 * round_s
        await asyncio.gather(stream, reading)
        # What was asked is answered before anything is read.
        assert all(len({item.is_prefill_chunk for item in call}) == 1 for call in draft.calls)
        pieces = [count for _, count, is_prefill_chunk in draft.told("prompt") if is_prefill_chunk]
        assert pieces[:11] == [num_tokens] * 11
        # It is drafted for as soon as the draft has read it.
        assert set(target.num_drafts["prompt"][-10:-2]) == {2}


async def test_what_is_left_when_a_piece_was_read_goes_with_the_next_question(clock: VirtualClock) -> None:
    draft = RecordingDraft(token_s=TOKEN_S / 4)
    config = router_config(prefill_chunk_tokens=256)
    async with serving(clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3) as pair:
        call = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=60)))
        await asyncio.sleep(0.2)
        draft.forget("a")
        begun = len(draft.told("a"))
        await call
        told = draft.told("a")[begun:]
        first = next(index for index, (base_len, _, _) in enumerate(told) if base_len == 0)
        assert [(base_len, is_chunk) for base_len, _, is_chunk in told[first : first + 2]] == [
            (0, True),
            (256, False),
        ]


# Several prompts


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
async def test_a_burst_of_prompts_shares_what_is_read_at_once_and_the_first_comes_first(
    clock: VirtualClock, overlap: str
) -> None:
    draft = RecordingDraft(token_s=TOKEN_S / 4)
    config = router_config(prefill_chunk_tokens=256)
    async with serving(clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3) as pair:
        await complete(pair, *(request(name, LONG, max_tokens=40) for name in "abc"))
        calls = [[(item.request_id, len(item.token_ids)) for item in call] for call in draft.calls]
        assert calls[:2] == [[("a", 256)], [("a", 44), ("b", 212)]]
        prompts = [sum(len(item.token_ids) for item in call if item.base_len < 300) for call in draft.calls]
        assert max(prompts) == 256
        await pair.settle()


async def test_prompts_that_come_while_one_is_being_read_are_not_added_to_it(clock: VirtualClock) -> None:
    # A piece takes as long as twelve target steps.
    draft = RecordingDraft(token_s=0.001)
    config = router_config(prefill_chunk_tokens=256)
    async with serving(
        clock, draft=draft, config=config, overlap="enumerate", num_speculative_tokens=3
    ) as pair:
        first = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=30)))
        await asyncio.sleep(0.050)
        second = asyncio.create_task(complete(pair, request("b", LONG, max_tokens=30)))
        await asyncio.sleep(0.200)
        assert draft.told("a") == [(0, 256, True)]
        assert draft.told("b") == []
        await until_piece(draft, 2)
        assert draft.told("b")[0][0] == 0
        await asyncio.gather(first, second)


async def test_many_short_prompts_at_once_are_no_long_call_either(clock: VirtualClock) -> None:
    draft = RecordingDraft()
    config = router_config(prefill_chunk_tokens=64)
    async with serving(clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3) as pair:
        given = [request(str(index), LONG[index : index + 20], max_tokens=30) for index in range(16)]
        await complete(pair, *given)
        prompts = [sum(len(item.token_ids) for item in call if item.base_len < 20) for call in draft.calls]
        assert max(prompts) <= 64
        assert sum(base_len == 0 for one in given for base_len, _, _ in draft.told(one.request_id)) == 16
