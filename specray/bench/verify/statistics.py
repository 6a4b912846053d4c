"""Tests of whether two arms differ by more than chance: divergences per token, and tasks that are solved."""

from __future__ import annotations

import math


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
