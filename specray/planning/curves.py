"""Interpolates step times between and beyond the measured sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

Point = tuple[float, float]
"""A point of a curve: (size, seconds)."""


def interpolate(curve: Sequence[Point], size: float) -> float:
    """Returns the seconds at ``size``: linear between points, flat below the first, growing beyond the last.

    Args:
        curve: points by increasing size, at least one.
        size: size of the step.
    """
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    index = min(bisect_left(curve, (size, 0.0)), len(curve) - 1)
    (low, less), (high, more) = curve[index - 1], curve[index]
    slope = (more - less) / (high - low)
    if size > high:
        # A step that was measured too fast must not make larger ones free.
        return more + max(0.0, slope) * (size - high)
    return less + slope * (size - low)


class Surface:
    """Seconds by two sizes: for each first size a curve over the second.

    Args:
        points: (first size, second size, seconds); at least one.
    """

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        curves: dict[float, list[Point]] = {}
        for first, second, seconds in points:
            curves.setdefault(first, []).append((second, seconds))
        assert curves, "a surface has points"
        self._curves = [(first, sorted(curve)) for first, curve in sorted(curves.items())]
        self._known: dict[tuple[float, float], float] = {}

    def __call__(self, first: float, second: float) -> float:
        """Returns the seconds at the two sizes."""
        key = first, second
        seconds = self._known.get(key)
        if seconds is None:
            across = [(size, interpolate(curve, second)) for size, curve in self._curves]
            seconds = self._known[key] = interpolate(across, first)
        return seconds
