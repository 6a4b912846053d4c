"""How long clients waited after a fault; plain arithmetic on times of arrival."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Times = Sequence[float]
"""In seconds and ascending; a stream's first is its request's start, each other one an event with text."""

INTERRUPTED_S = 1.0
"""Speculation that pauses for less has not been away: readings of the counter are this far apart at most."""


def longest_wait_s(streams: Sequence[Times], fault_s: float, until_s: float) -> float | None:
    """The longest time for which a stream that ran at the fault waited for its next text, in seconds.

    Counted from the fault or the text before, whichever came later, to ``until_s`` at most, when the next
    fault comes. None: no stream ran that got more text.
    """
    waits = [
        min(later, until_s) - max(earlier, fault_s)
        for times in streams
        if times and times[0] <= fault_s
        for earlier, later in itertools.pairwise(times)
        if later > fault_s and earlier < until_s
    ]
    return max(waits, default=None)


def back_after_s(changes: Times, fault_s: float, until_s: float) -> float | None:
    """When a counter went on after its longest stand, in seconds from the fault.

    Args:
        changes: when the counter was seen to have changed.
        until_s: when the next fault comes; how long the counter stood after that does not count.

    Returns:
        0 when it never stood for long; None when it did not go on.
    """
    before = [time for time in changes if time <= fault_s]
    after = [time for time in changes if time > fault_s]
    if not after:
        return None
    edges = [max(before[-1:], default=fault_s), *after]
    stands = [
        (min(later, until_s) - max(earlier, fault_s), later)
        for earlier, later in itertools.pairwise(edges)
        if earlier < until_s
    ]
    if not stands:
        return None
    length_s, end_s = max(stands)
    return end_s - fault_s if length_s >= INTERRUPTED_S else 0.0


def changes_of(readings: Sequence[tuple[float, float]]) -> list[float]:
    """When a counter was seen with a new value; readings are (seconds, value)."""
    pairs = itertools.pairwise(readings)
    return [at_s for (_, before), (at_s, value) in pairs if value != before]
