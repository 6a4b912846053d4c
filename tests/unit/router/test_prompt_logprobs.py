"""Logprobs of prompts through a router: whole, in chunks, and computed twice after a loss."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specray.fakes import FakeTarget, VirtualClock
from specray.types import TargetReplies, TokenLogprobs, VerifyItem
from tests.unit.router.harness import expected, request, router_config, serving

PROMPT = tuple(range(1, 51))
SCORES = tuple(TokenLogprobs(token, -float(token)) for token in PROMPT[1:])


@pytest.mark.parametrize("chunk", [16, 23, 1000])
async def test_last_chunk_carries_those_of_all_prompt_tokens_but_the_first(
    clock: VirtualClock, chunk: int
) -> None:
    async with serving(clock, config=router_config(prefill_chunk_tokens=chunk)) as pair:
        given = request("a", PROMPT, 6, num_prompt_logprobs=0)
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert output.prompt_logprobs == SCORES
        plain = await pair.router.complete(request("b", PROMPT, 6))
        assert plain.prompt_logprobs == ()


async def test_stream_has_them_in_its_last_chunk(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        given = request("a", PROMPT, 6, num_prompt_logprobs=0)
        chunks = [chunk async for chunk in pair.router.stream(given)]
        assert [chunk.prompt_logprobs for chunk in chunks[:-1]] == [()] * (len(chunks) - 1)
        assert chunks[-1].prompt_logprobs == SCORES


@pytest.mark.parametrize("step", [2, 3, 4, 5])
async def test_prompt_that_is_computed_again_has_each_once(
    clock: VirtualClock, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = FakeTarget.verify

    def forgetful(engine: FakeTarget, items: Sequence[VerifyItem]) -> TargetReplies:
        if engine.num_steps == step - 1:
            engine.release(["a"])
        return verify(engine, items)

    monkeypatch.setattr(FakeTarget, "verify", forgetful)
    async with serving(clock, config=router_config(prefill_chunk_tokens=16)) as pair:
        given = request("a", PROMPT, 12, num_prompt_logprobs=0)
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert output.prompt_logprobs == SCORES
