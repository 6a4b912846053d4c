"""What a device draws is what a CPU draws, over random steps of all rules and processors."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.sampler import CpuSampler
from specray.engine.sampling.verify import Round, Verified, verify_rejection
from specray.types import SamplingParams, Verification
from tests.unit.engine.sampling.device.cases import random_group, random_logits, random_rounds
from tests.unit.engine.sampling.rows import row_group

VOCAB_SIZES = (1, 2, 5, 33, 500)
NUM_SEEDS = 24
"""Random steps of each size."""


def samplers(vocab_size: int, support: int = 64) -> tuple[DeviceSampler, CpuSampler]:
    return DeviceSampler(Kernels(), support), CpuSampler(vocab_size, support)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_verdicts_are_those_of_a_cpu(vocab_size: int) -> None:
    device, cpu = samplers(vocab_size)
    for seed in range(NUM_SEEDS):
        logits, rounds = random_rounds(seed, vocab_size, 1 + seed % 7)
        before = logits.clone()
        assert device.verify(logits, rounds) == cpu.verify(logits, rounds), seed
        assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draft_tokens_are_those_of_a_cpu(vocab_size: int) -> None:
    device, cpu = samplers(vocab_size, support=20)
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        groups = [random_group(rng, vocab_size, 0) for _ in range(1 + seed % 5)]
        logits = random_logits(rng, len(groups), vocab_size)
        drawn, expected = (each.draw(logits, groups, is_judged=True) for each in (device, cpu))
        for token, other in zip(drawn, expected, strict=True):
            assert token.token_id == other.token_id, seed
            assert (token.probs is None) == (other.probs is None)
            if token.probs is not None and other.probs is not None:
                assert token.probs.token_ids == other.probs.token_ids
                assert token.probs.probs == pytest.approx(other.probs.probs, rel=1e-6)
            else:
                assert token.logprob == pytest.approx(other.logprob, abs=0.12)


def test_leads_are_zero_unless_asked_for() -> None:
    rng = random.Random(0)
    device, _ = samplers(30)
    groups = [random_group(rng, 30, 0, plain=True) for _ in range(6)]
    assert {token.logprob for token in device.draw(random_logits(rng, 6, 30), groups)} == {0.0}


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_ranked_tokens_are_those_of_a_cpu(vocab_size: int) -> None:
    device, cpu = samplers(vocab_size)
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        groups = [random_group(rng, vocab_size, rng.randint(0, 3)) for _ in range(1 + seed % 4)]
        num_rows = sum(group.num_rows for group in groups)
        # Without ties, in whose order a sort is free; greedy rows have no noise to break them.
        logits = random_logits(rng, num_rows, vocab_size) + 0.01 * torch.randn(num_rows, vocab_size)
        counts = [rng.randint(0, 12) for _ in range(num_rows)]
        excluded = [rng.choice((None, rng.randrange(vocab_size))) for _ in range(num_rows)]
        ranked, expected = (each.rank(logits, groups, counts, excluded) for each in (device, cpu))
        for row, other in zip(ranked, expected, strict=True):
            assert [token for token, _ in row.next_tokens] == [token for token, _ in other.next_tokens], seed
            assert [value for _, value in row.next_tokens] == pytest.approx(
                [value for _, value in other.next_tokens], abs=1e-4
            )
            assert row.excluded_logprob == pytest.approx(other.excluded_logprob, abs=1e-4)


def test_a_sequence_does_not_depend_on_those_beside_it() -> None:
    device, _ = samplers(40)
    for seed in range(20):
        logits, rounds = random_rounds(seed, 40, 6)
        together = device.verify(logits, rounds)
        pieces = logits.split([item.group.num_rows for item in rounds])
        assert together == [device.verify(rows, [item])[0] for rows, item in zip(pieces, rounds, strict=True)]


def test_equal_distributions_that_leave_nothing_give_the_targets_own_token() -> None:
    """The draft token is one that its distribution cannot produce."""
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [0.0] * 4])
    probs = SparseProbs((0, 1), (0.5, 0.5))
    device, _ = samplers(4)
    seen = set()
    for seed in range(20):
        sampling = SamplingParams(seed=seed, verification=Verification.REJECTION)
        item = Round(row_group(sampling, [0, 0, 2], 2), (2,), (probs,))
        [verified] = device.verify(logits, [item])
        expected = verify_rejection(logits, (2,), (probs,), noise=NoiseSource(4), seed=seed, first_position=2)
        assert verified == expected
        assert verified.num_accepted_tokens == 0
        seen.add(verified.next_token_id)
    assert seen == {0, 1}


def test_half_precision_logits_are_drawn_from_as_float32() -> None:
    device, cpu = samplers(100)
    logits, rounds = random_rounds(3, 100, 4)
    rounds = [
        item._replace(group=replace(item.group, sampling=replace(item.group.sampling, temperature=1.0)))
        for item in rounds
    ]
    half = logits.bfloat16()
    verdicts: list[Verified] = device.verify(half, rounds)
    assert verdicts == cpu.verify(half.float(), rounds)
