"""Tests of whether two arms differ by more than chance: divergences per token, and samples of tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

LEAST_EXPECTED = 5.0
"""Samples of an outcome, on average of both arms, below which outcomes are counted together."""


def excess_p_value(num_events: int, exposure: int, base_events: int, base_exposure: int) -> float:
    """Chance of so many events or more where both arms have one rate of events per token.

    Given the events of both arms together, each is one of the first arm's with its share of the tokens.

    Args:
        num_events, base_events: divergences of the arm, and of the one that it is compared with.
        exposure, base_exposure: tokens up to and with the divergences; at least one.
    """
    share = exposure / (exposure + base_exposure)
    total = num_events + base_events
    return sum(
        math.comb(total, count) * share**count * (1 - share) ** (total - count)
        for count in range(num_events, total + 1)
    )


def worse_p_value(num_lost: int, num_won: int) -> float:
    """Chance that of the tasks which one of two arms solved so many or more were lost, where both are alike.

    McNemar's test, exact and one-sided.

    Args:
        num_lost: tasks that only plain decoding solved.
        num_won: tasks that only the other arm solved.
    """
    total = num_lost + num_won
    return float(sum(math.comb(total, count) for count in range(num_lost, total + 1)) / 2**total)


def homogeneity_p_value(left: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    """Pearson's test of whether two samples have one distribution; rare outcomes are counted together.

    Returns:
        1.0 where there is only one outcome left to compare.
    """
    counts = _pooled(Counter(left), Counter(right))
    if len(counts) < 2:
        return 1.0
    total = len(left) + len(right)
    statistic = 0.0
    for own, other in counts:
        both = own + other
        for count, size in ((own, len(left)), (other, len(right))):
            expected = both * size / total
            statistic += (count - expected) ** 2 / expected
    return _chi_square_tail(statistic, len(counts) - 1)


def _pooled(left: Mapping[Hashable, int], right: Mapping[Hashable, int]) -> list[tuple[int, int]]:
    pairs = [(left.get(key, 0), right.get(key, 0)) for key in {**left, **right}]
    kept = [pair for pair in pairs if sum(pair) >= 2 * LEAST_EXPECTED]
    rare = [pair for pair in pairs if sum(pair) < 2 * LEAST_EXPECTED]
    together = (sum(own for own, _ in rare), sum(other for _, other in rare))
    if sum(together) >= 2 * LEAST_EXPECTED or not kept:
        return [*kept, together] if sum(together) else kept
    # Too few even together: with the rarest of the others.
    kept.sort(key=sum)
    first, *others = kept
    return [(first[0] + together[0], first[1] + together[1]), *others]


def _chi_square_tail(statistic: float, freedom: int) -> float:
    import torch

    values = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(values[0], values[1]))
