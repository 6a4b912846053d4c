"""Tests of whether samples have a distribution: how probable such samples are if they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def chi_square_p_value(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Of Pearson's test: counts of outcomes, and the counts that the distribution makes one expect."""
    counts = torch.tensor(observed, dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(counts.sum(), wanted.sum(), rtol=1e-8, atol=0)
    statistic = ((counts - wanted).square() / wanted).sum()
    freedom = torch.tensor(len(observed) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def kolmogorov_smirnov_p_value(
    samples: Sequence[float], cumulative: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Of the Kolmogorov-Smirnov test against a cumulative distribution function; for hundreds of samples."""
    below = cumulative(torch.tensor(samples, dtype=torch.float64).sort().values)
    steps = torch.arange(len(samples) + 1, dtype=torch.float64) / len(samples)
    distance = torch.maximum(steps[1:] - below, below - steps[:-1]).max()
    root = len(samples) ** 0.5
    # Stephens' correction of the limit distribution: off by less than a hundredth of the p-value here.
    scaled = (root + 0.12 + 0.11 / root) * distance
    terms = torch.arange(1, 101, dtype=torch.float64)
    signs = 1 - 2 * ((terms - 1) % 2)
    return float((2 * signs * torch.exp(-2 * (terms * scaled).square())).sum().clamp(0, 1))
