"""Chances that are known."""

from __future__ import annotations

import pytest

from specray.bench.verify.run import excess_p_value


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
