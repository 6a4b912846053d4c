"""Comparisons of a device's sampling kernels with a CPU, for the interpreter and for a GPU."""

from __future__ import annotations

import random

import numpy as np
import torch

from specray.engine.sampling.device.kernels import Kernels, processed
from specray.engine.sampling.device.rows import RowTable, key_words
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.draft import DraftToken
from specray.engine.sampling.noise import NoiseKey, NoiseSource, PhiloxGenerator, Purpose
from specray.engine.sampling.sampler import CpuSampler
from tests.unit.engine.sampling.device.cases import random_group, random_logits, random_rounds

KEYS = (
    NoiseKey((1 << 64) - 1, 131_071, Purpose.RESIDUAL_DRAW),
    NoiseKey(1 << 63, 0, Purpose.COUPLED_DRAW),
    NoiseKey(0, (1 << 31) + 1, Purpose.DRAFT_DRAW),
    NoiseKey(12_345, 7, Purpose.ACCEPT_TEST),
)


def check_noise(kernels: Kernels, device: torch.device, count: int) -> None:
    """Words are equal, Gumbel numbers but for a unit in the last place."""
    keys = torch.from_numpy(key_words(KEYS)).to(device)
    token_ids = torch.arange(count, device=device).expand(len(KEYS), count)
    words = np.stack([PhiloxGenerator().words(key, count) for key in KEYS])
    assert np.array_equal(kernels.words(keys, token_ids).cpu().numpy().view(np.uint64), words)
    noise = NoiseSource(count).gumbel(KEYS)
    torch.testing.assert_close(kernels.gumbel(keys, count).cpu(), noise, rtol=1e-14, atol=1e-14)
    keys[1, 2] = -1
    assert not kernels.gumbel(keys, count)[1].any()


def check_sampler(kernels: Kernels, device: torch.device, vocab_size: int, seeds: range) -> None:
    """Verdicts and draft tokens of random steps are those of a CPU."""
    sampler, cpu = DeviceSampler(kernels, 20), CpuSampler(vocab_size, 20)
    for seed in seeds:
        logits, rounds = random_rounds(seed, vocab_size, 1 + seed % 4)
        assert sampler.verify(logits.to(device), rounds) == cpu.verify(logits, rounds), (vocab_size, seed)
        rng = random.Random(seed)
        groups = [random_group(rng, vocab_size, 0) for _ in range(1 + seed % 3)]
        logits = random_logits(rng, len(groups), vocab_size)
        drawn = sampler.draw(logits.to(device), groups, is_judged=True)
        expected = cpu.draw(logits, groups, is_judged=True)
        for token, other in zip(drawn, expected, strict=True):
            if _differ_by_ties(token, other):
                continue
            assert token.token_id == other.token_id, (vocab_size, seed)
            assert abs(token.logprob - other.logprob) < 0.12


def _differ_by_ties(token: DraftToken, other: DraftToken) -> bool:
    """Of equal tokens at the edge of a truncated distribution either may be in it; the rest is the same."""
    if token.probs is None or other.probs is None or set(token.probs.token_ids) == set(other.probs.token_ids):
        return False
    torch.testing.assert_close(sorted(token.probs.probs), sorted(other.probs.probs), rtol=1e-5, atol=1e-7)
    for own, others in ((token.probs, other.probs), (other.probs, token.probs)):
        alone = [
            prob for each, prob in zip(own.token_ids, own.probs, strict=True) if each not in others.token_ids
        ]
        torch.testing.assert_close(alone, [min(own.probs)] * len(alone), rtol=1e-5, atol=1e-7)
    return True


def check_cuts(kernels: Kernels, device: torch.device, vocab_size: int, num_rows: int) -> None:
    """Top-k, top-p and min-p at their edges, with ties, keep what a sort keeps."""
    rng = random.Random(vocab_size)
    logits = random_logits(rng, num_rows, vocab_size)
    logits[: num_rows // 2] = logits[: num_rows // 2].round()
    logits[0] = 0.0
    logits[1, ::2] = -torch.inf
    logits[2] = torch.where(logits[2] > 0, 0.0, -0.0)

    def column(values: tuple[float, ...]) -> torch.Tensor:
        picked = [rng.choice(values) for _ in range(num_rows)]
        return torch.tensor(picked, dtype=torch.float64, device=device)

    rows = RowTable(
        torch.zeros(num_rows, 3, dtype=torch.int64, device=device),
        column((0.3, 1.0, 1.7)),
        column((0, 0, 1, 2, 5, vocab_size - 1, vocab_size, 10**9)).long(),
        column((1.0, 1e-9, 0.317, 0.8971, 0.999999)),
        column((-torch.inf, -torch.inf, 0.0, -3.0)),
        cuts=True,
    )
    remote = logits.to(device)
    kept, expected = (
        processed(remote, rows, each.cut(remote, rows)).isfinite() for each in (kernels, Kernels())
    )
    different = (kept != expected).any(-1).nonzero()[:, 0].tolist()
    assert not different, [
        (row, *(float(each[row]) for each in (rows.divisors, rows.top_k, rows.top_p))) for row in different
    ]
