"""Chances that are known, and samples that are too rare to be compared one by one."""

from __future__ import annotations

import pytest

from specray.bench.verify.statistics import excess_p_value, homogeneity_p_value


@pytest.mark.parametrize(
    ("events", "chance"),
    [
        ((0, 100, 0, 100), 1.0),
        ((1, 100, 0, 100), 0.5),
        ((3, 100, 0, 100), 0.125),
        ((3, 100, 1, 100), 5 / 16),
        ((2, 50, 0, 150), 1 / 16),
    ],
)
def test_excess_of_divergences_is_binomial_in_the_share_of_tokens(
    events: tuple[int, int, int, int], chance: float
) -> None:
    assert excess_p_value(*events) == pytest.approx(chance, rel=1e-12)


def test_two_samples_by_pearsons_test() -> None:
    left, right = ["a"] * 30 + ["b"] * 70, ["a"] * 50 + ["b"] * 50
    # A statistic of 25 / 3 with one degree of freedom.
    assert homogeneity_p_value(left, right) == pytest.approx(0.0038924, rel=1e-4)
    assert homogeneity_p_value(left, left) == 1.0


def test_outcomes_that_are_rare_count_together() -> None:
    left, right = [*"aaaaaaaaaaaaaaa", *range(40)], [*"aaaaaaaaaaaaaaa", *range(100, 140)]
    assert homogeneity_p_value(left, right) == 1.0


def test_one_outcome_says_nothing() -> None:
    assert homogeneity_p_value(["a"] * 50, ["a"] * 40) == 1.0
    assert homogeneity_p_value(["a"] * 50, ["a"] * 49 + ["b"]) == 1.0
