"""The tests of distributions, against published critical values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.engine.sampling.p_values import chi_square_p_value, kolmogorov_smirnov_p_value


@pytest.mark.parametrize(
    ("num_outcomes", "critical", "p_value"), [(2, 3.841, 0.05), (2, 6.635, 0.01), (11, 29.588, 0.001)]
)
def test_chi_square_has_the_tabled_critical_values(
    num_outcomes: int, critical: float, p_value: float
) -> None:
    expected = [100.0] * num_outcomes
    # Two outcomes that differ by as much, in both directions, make the whole statistic.
    difference = math.sqrt(critical * 100.0 / 2)
    observed = [100.0 + difference, 100.0 - difference, *expected[2:]]
    assert chi_square_p_value(observed, expected) == pytest.approx(p_value, rel=2e-3)


@pytest.mark.parametrize(("critical", "p_value"), [(1.2239, 0.1), (1.3581, 0.05), (1.6276, 0.01)])
def test_kolmogorov_smirnov_has_the_tabled_critical_values(critical: float, p_value: float) -> None:
    """Of the limit distribution, which as many samples as these are close to."""
    num_samples = 100_000
    even = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
    # A shift makes the largest distance; half a sample's step is there without it.
    shift = critical / math.sqrt(num_samples) - 0.5 / num_samples
    samples = (even * (1 - shift)).tolist()
    assert kolmogorov_smirnov_p_value(samples, torch.clone) == pytest.approx(p_value, rel=1e-2)


def test_samples_of_another_distribution_are_told_apart() -> None:
    assert kolmogorov_smirnov_p_value(torch.linspace(0, 1, 500).square().tolist(), torch.clone) < 1e-9
    assert kolmogorov_smirnov_p_value(torch.linspace(0, 1, 500).tolist(), torch.clone) > 0.999
    assert chi_square_p_value([90, 10], [50, 50]) < 1e-9
