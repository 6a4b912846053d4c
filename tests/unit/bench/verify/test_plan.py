"""What the cases are for: a fault that each of them must show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specray.bench.verify.outputs import VerifiedOutput, agreement
from specray.bench.verify.plan import CASES
from specray.engine.sampling.draws import draw_tokens
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.state import RowGroup, SamplingState
from specray.engine.sampling.verify import draw_keys
from specray.types import SamplingParams

VOCAB_SIZE = 64
NUM_DRAFT_TOKENS = 4
NOISE = NoiseSource(VOCAB_SIZE)
LOGITS = 3.0 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
"""Logits of the token after each token."""
PENALTIES = CASES[2]
NUM_OUTPUTS = 12
"""As many as ``verify`` compares unless it is told otherwise."""
NumSeen = Callable[[int], int]
"""Tokens of a prefix that the penalties count, by its length."""


def sampled(seed: int, num_seen: NumSeen, *, num_tokens: int = 48) -> VerifiedOutput:
    """An output of the service's own processors and coupled draws."""
    options = {key: value for key, value in PENALTIES.sampling.items() if key != "min_tokens"}
    sampling = SamplingParams(seed=seed, num_prompt_tokens=1, **options)
    tokens = [seed]
    for _ in range(num_tokens):
        state = SamplingState(sampling, tokens[: num_seen(len(tokens))])
        group = RowGroup(sampling, state, (), (len(tokens),))
        processed = process_logits(LOGITS[tokens[-1]][None], [group])
        (draw,) = draw_tokens(processed, draw_keys(group), NOISE)
        tokens.append(draw.token_id)
    return VerifiedOutput(tuple(tokens[1:]))


@pytest.fixture(scope="module")
def plain() -> list[VerifiedOutput]:
    return [sampled(seed, lambda length: length) for seed in range(NUM_OUTPUTS)]


@pytest.mark.slow
def test_penalties_without_the_last_draft_token_show(plain: list[VerifiedOutput]) -> None:
    def without_last(length: int) -> int:
        return length - (length % (NUM_DRAFT_TOKENS + 1) != 0)

    found = agreement(plain, [sampled(seed, without_last) for seed in range(NUM_OUTPUTS)])
    assert found.num_diverged >= 3


@pytest.mark.slow
def test_penalties_of_the_prefix_before_the_draft_show(plain: list[VerifiedOutput]) -> None:
    def before_draft(length: int) -> int:
        return length - length % (NUM_DRAFT_TOKENS + 1)

    found = agreement(plain, [sampled(seed, before_draft) for seed in range(NUM_OUTPUTS)])
    assert found.num_diverged >= 5
