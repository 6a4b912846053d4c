"""Ranks that exchange their best tokens draw what one process draws from all logits."""

from __future__ import annotations

import random

import pytest
import torch

from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.rows import row_settings
from specray.engine.sampling.device.shards import SHARD_MULTIPLE, ShardDrawer, ShardDraws, best_of_ranks
from specray.engine.sampling.noise import NoiseKey, Purpose
from specray.engine.sampling.sampler import CpuSampler
from specray.engine.sampling.state import SamplingState, chain_rows
from specray.engine.sampling.verify import draw_keys
from specray.types import SamplingParams

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=(1 << 64) - 1, temperature=0.3),
    SamplingParams(seed=1 << 63, temperature=1.7),
)


def draw(logits: torch.Tensor, draws: ShardDraws, world_size: int) -> list[int]:
    width = -(-logits.shape[1] // (SHARD_MULTIPLE * world_size)) * SHARD_MULTIPLE
    encoded = draws.encode()
    parts = [
        ShardDrawer(Kernels(), first).best(logits[:, first : first + width], encoded)
        for first in range(0, logits.shape[1], width)
    ]
    return best_of_ranks(torch.stack(parts))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab_size", [96, 94])
def test_draws_are_those_of_whole_rows(world_size: int, vocab_size: int) -> None:
    source = random.Random(vocab_size)
    for seed in range(6):
        states = [SamplingState(each, [3] * source.randint(1, 9)) for each in SAMPLINGS]
        groups = [chain_rows(state) for state in states]
        generator = torch.Generator().manual_seed(seed)
        logits = 2.0 * torch.randn(len(groups), vocab_size, generator=generator)
        draws = ShardDraws(
            [key for group in groups for key in draw_keys(group)],
            [row_settings(group)[0] for group in groups],
        )
        expected = [token and token.token_id for token in CpuSampler(vocab_size).draw(logits, groups)]
        assert draw(logits, draws, world_size) == expected


def test_of_equal_scores_the_first_token_counts() -> None:
    logits = torch.zeros(1, 16)
    logits[0, [6, 9, 15]] = 2.0
    for world_size in (1, 2, 4):
        assert draw(logits, ShardDraws([None], [1.0]), world_size) == [6]


def test_draws_survive_the_wire() -> None:
    """Their numbers are those of a float64, to the last bit."""
    draws = ShardDraws([NoiseKey((1 << 64) - 1, 7, Purpose.COUPLED_DRAW), None], [0.1 + 0.2, 1.0])
    encoded = draws.encode()
    assert len(encoded) == 8 and encoded[:3] == [-1, 7, int(Purpose.COUPLED_DRAW)]
    divisors = torch.tensor([encoded[3], encoded[7]]).view(torch.float64)
    assert divisors.tolist() == [0.1 + 0.2, 1.0]


def test_a_rank_begins_with_a_block_of_noise() -> None:
    with pytest.raises(AssertionError):
        ShardDrawer(Kernels(), 6)
