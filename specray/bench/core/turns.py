"""Arms in turns (A B A B ...), so that changes of the machine's speed touch all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median, stdev
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class ArmPass(NamedTuple, Generic[T]):
    """One pass of one arm."""

    number: int
    """Number of the turn, from 0; negative: a warm-up, which does not count."""
    place: int
    """Index of what is asked for in this pass, such as a prompt."""
    arm: T

    @property
    def counts(self) -> bool:
        return self.number >= 0


def in_turns(
    arms: Sequence[T],
    num_turns: int,
    *,
    num_warmup: int = 0,
    num_places: int = 1,
    is_rotated: bool = False,
) -> Iterator[ArmPass[T]]:
    """Yields every arm at every place in each turn.

    Args:
        num_warmup: turns before the first one that counts.
        num_places: passes of an arm in a turn; at each place all arms have their pass before the next place.
        is_rotated: another arm is the first at each place; in a warm-up the first one always is.
    """
    for number in range(-num_warmup, num_turns):
        for place in range(num_places):
            first = (number + place) % len(arms) if is_rotated and number >= 0 else 0
            for arm in (*arms[first:], *arms[:first]):
                yield ArmPass(number, place, arm)


def medians_ms(
    calls: Sequence[Callable[[], object]],
    num_repeats: int,
    *,
    num_warmup: int,
    wait: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Times calls in turns; returns the median of each in milliseconds.

    Args:
        wait: called before and after each call, such as for a GPU to be done.
        clock: seconds; processor time counts nothing else that runs on the machine.
    """
    durations: list[list[float]] = [[] for _ in calls]
    for turn in in_turns(range(len(calls)), num_repeats, num_warmup=num_warmup):
        wait()
        began = clock()
        calls[turn.arm]()
        wait()
        if turn.counts:
            durations[turn.arm].append(1e3 * (clock() - began))
    return [median(own) for own in durations]


class Speedup(NamedTuple):
    """How many times faster an arm was than another."""

    mean: float
    error: float
    """Standard error of the mean."""


def ratios(rates: Sequence[float], base: Sequence[float]) -> list[float]:
    """The arm's rate over the base's in the same pass.

    On a machine whose speed changes from minute to minute, the two saw the same speed, but the sums of all
    passes did not.
    """
    return [rate / other for rate, other in zip(rates, base, strict=True) if other > 0]


def speedup_in_turns(rates: Sequence[float], base: Sequence[float]) -> Speedup | None:
    """Mean ratio of the passes of two arms, as many of each; None with fewer than three passes."""
    found = ratios(rates, base)
    return Speedup(mean(found), stdev(found) / math.sqrt(len(found))) if len(found) >= 3 else None
