"""Logprobs of a prompt's own tokens: those of the library's forward, however the prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specray.config import parse_config
from specray.demo.paths import demo_target_path
from specray.draft_tokens import DraftTokens
from specray.engine.build import build_target_engine
from specray.engine.target.engine import TargetEngine
from specray.tokenization import load_tokenizer
from specray.types import SamplingParams, TargetReply, TokenLogprobs, Verdict, VerifyItem

TEXT = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n" * 3
)
CONFIG: dict[str, Any] = {"dtype": "float32", "profile_s": 0, "max_model_len": 256, "max_num_seqs": 4}


@cache
def target() -> TargetEngine:
    return build_target_engine(parse_config({"target": {**CONFIG, "num_threads": 1}}))


@cache
def prompt() -> tuple[int, ...]:
    token_ids = load_tokenizer("embedded").encode(TEXT)
    assert len(token_ids) > 80
    return token_ids


@cache
def expected() -> torch.Tensor:
    """Logprobs of what follows each token of the prompt, ``[num_tokens, vocab_size]``."""
    model = AutoModelForCausalLM.from_pretrained(demo_target_path(), dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt()])).logits[0]
    return logits.double().log_softmax(-1)


def sampling(num_top: int | None = 2) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_prompt_tokens=len(prompt()), num_prompt_logprobs=num_top)


def verdict_of(reply: TargetReply) -> Verdict:
    assert isinstance(reply, Verdict), reply
    return reply


def scored(name: str, ends: Sequence[int], *, drafts: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    """The prompt in chunks that end where ``ends`` say, the last of which is sampled."""
    scores: list[TokenLogprobs] = []
    start = 0
    for number, end in enumerate(ends):
        is_last = number == len(ends) - 1
        item = VerifyItem(
            name, number, start, prompt()[start:end], DraftTokens(drafts if is_last else ()),
            sample=is_last, sampling=sampling() if start == 0 else None,
        )  # fmt: skip
        [reply] = target().verify([item]).replies
        scores += verdict_of(reply).prompt_logprobs
        start = end
    target().release([name])
    return scores


def check(scores: Sequence[TokenLogprobs]) -> None:
    assert [score.token_id for score in scores] == list(prompt()[1:])
    for place, score in enumerate(scores):
        best = expected()[place].topk(2)
        assert score.logprob == pytest.approx(float(expected()[place, score.token_id]), abs=1e-3)
        assert score.top_token_ids == tuple(best.indices.tolist())
        assert score.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-3)


def test_whole_prompt_has_the_librarys_logprobs() -> None:
    check(scored("whole", [len(prompt())]))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prompt_in_chunks_has_them_for_each_chunks_first_token_too(size: int) -> None:
    ends = [*range(size, min(len(prompt()), 40 * size), size), len(prompt())]
    check(scored("chunks", ends))


def test_prompt_that_the_prefix_cache_knows_is_computed_again() -> None:
    for name in ("first", "second"):
        item = VerifyItem(name, 0, 0, prompt(), sampling=sampling(None))
        target().verify([item])
        target().release([name])
    before = target().info.num_prefix_cache_hits
    check(scored("again", [len(prompt())]))
    assert target().info.num_prefix_cache_hits == before


def test_draft_tokens_behind_the_prompt_are_verified_beside_its_logprobs() -> None:
    check(scored("drafted", [40, len(prompt())], drafts=(5, 6, 7)))


def test_requests_with_and_without_share_a_step() -> None:
    plain = VerifyItem("plain", 0, 0, prompt(), sampling=sampling(None))
    [alone] = target().verify([plain]).replies
    target().release(["plain"])
    items = [
        VerifyItem("chunk", 0, 0, prompt()[:30], sample=False, sampling=sampling()),
        plain,
        VerifyItem("scored", 0, 0, prompt(), sampling=sampling()),
    ]
    chunk, beside, whole = map(verdict_of, target().verify(items).replies)
    target().release(["chunk", "plain", "scored"])
    assert len(chunk.prompt_logprobs) == 29 and chunk.next_token_id is None
    assert beside.prompt_logprobs == ()
    assert beside.next_token_id == whole.next_token_id == verdict_of(alone).next_token_id
    check(whole.prompt_logprobs)


def test_output_tokens_have_no_prompt_logprobs() -> None:
    resumed = SamplingParams(temperature=0.0, num_prompt_tokens=20, num_prompt_logprobs=0)
    item = VerifyItem("resumed", 0, 0, prompt()[:30], sampling=resumed)
    [reply] = target().verify([item]).replies
    target().release(["resumed"])
    scores = verdict_of(reply).prompt_logprobs
    assert [score.token_id for score in scores] == list(prompt()[1:20])
    assert all(score.top_token_ids == () for score in scores)
