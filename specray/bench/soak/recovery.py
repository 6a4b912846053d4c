"""Computes how long clients waited after a fault: plain arithmetic on times of arrival."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Times = Sequence[float]
"""Times in seconds, ascending: the request's start, then an arrival for each event with text."""


def longest_wait_s(streams: Sequence[Times], fault_s: float, until_s: float) -> float | None:
    """Returns the longest time in seconds for which a stream that ran at the fault waited for its next text.

    Counted from the fault, or the text before if that is later, to ``until_s`` at most, when the next fault
    comes. None: no stream that ran then got more text.
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
    """Returns when a counter went on after its longest stop, in seconds from the fault.

    Args:
        changes: times at which the counter was seen to have changed.
        until_s: time of the next fault; later stops do not count.

    Returns:
        0 if it never stopped for long; None if it did not go on.
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
    # Seconds of a pause that counts as an interruption; readings of the counter are at most this far apart.
    return end_s - fault_s if length_s >= 1.0 else 0.0


def changes_of(readings: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the times at which a counter was seen with a new value; readings are (seconds, value)."""
    pairs = itertools.pairwise(readings)
    return [at_s for (_, before), (at_s, value) in pairs if value != before]
