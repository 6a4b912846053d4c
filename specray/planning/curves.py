"""Curves of step times by size: fitted to samples, so that they never fall, and read between and beyond them.

Means, not medians: a step that was held up is part of service, and rates follow from means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple, TypeVar

from specray.control import estimators
from specray.control.estimators import isotonic
from specray.planning.profile import LinearTime

_MIN_SAMPLES = 3
"""Least number of samples per size; fewer say nothing."""
MAX_JUMP = 3.0
"""Largest weight of a sample, as a multiple of the median: one of few must not be all that is known."""

SampleT = TypeVar("SampleT")


class Point(NamedTuple):
    """Mean time of steps of a size and a depth."""

    size: float
    depth: int
    seconds: float
    weight: float
    """Number of samples."""


def average(values: Iterable[float]) -> float:
    """Returns the mean of values >= 0, with those far above the median cut to a few times of it."""
    known = list(values)
    most = MAX_JUMP * median(known)
    return mean(min(value, most) for value in known)


def cell_of(size: float) -> int:
    """Returns the cell of a size: four per doubling; small sizes have their own."""
    return round(size) if size <= 4 else round(4 * math.log2(size)) - 4


def cell_points(
    passes: Sequence[Sequence[SampleT]],
    *,
    place: Callable[[SampleT], tuple[float, int]],
    value: Callable[[SampleT], float],
) -> list[Point]:
    """Returns for each cell the median of its passes' averages, ordered by size and depth.

    Neighbouring sizes share a cell, whose place is their mean. Cells with few samples count only if no cell
    has more.

    Args:
        passes: the steps of each pass.
        place: returns a step's size and depth.
        value: returns a step's seconds.
    """
    cells: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    for steps in passes:
        by_cell: dict[tuple[int, int], list[SampleT]] = {}
        for step in steps:
            size, depth = place(step)
            by_cell.setdefault((cell_of(size), depth), []).append(step)
        for cell, members in by_cell.items():
            size = mean(place(step)[0] for step in members)
            cells.setdefault(cell, []).append((len(members), size, average(map(value, members))))
    trusted = {cell: known for cell, known in cells.items() if max(known)[0] >= _MIN_SAMPLES}
    points = []
    for (_, depth), known in sorted((trusted or cells).items()):
        counts, sizes, seconds = zip(*known, strict=True)
        points.append(Point(mean(sizes), depth, median(seconds), sum(counts)))
    return points


def rising(points: Sequence[Point]) -> list[Point]:
    """Returns the nearest points, in weighted squares, that never fall with size or depth.

    By size at each depth first, then by depth at each size (isotonic regression).
    """
    by_depth = _rising_by(points, group=lambda one: one.depth, order=lambda one: one.size)
    return _rising_by(by_depth, group=lambda one: cell_of(one.size), order=lambda one: one.depth)


def _rising_by(
    points: Sequence[Point], *, group: Callable[[Point], int], order: Callable[[Point], float]
) -> list[Point]:
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(group(point), []).append(point)
    found: list[Point] = []
    for members in groups.values():
        members.sort(key=order)
        levels = isotonic([(one.seconds, one.weight) for one in members])
        found += [one._replace(seconds=level) for one, level in zip(members, levels, strict=True)]
    return sorted(found)


def fit_linear(passes: Iterable[Sequence[tuple[int, float]]]) -> LinearTime:
    """Fits a time per number of items by least squares; neither part is negative.

    Args:
        passes: (items, seconds) of each pass; the median of the passes' averages counts.
    """
    averages: dict[int, list[float]] = {}
    for samples in passes:
        by_count: dict[int, list[float]] = {}
        for count, seconds in samples:
            by_count.setdefault(count, []).append(seconds)
        trusted = {n: values for n, values in by_count.items() if len(values) >= _MIN_SAMPLES}
        for count, values in (trusted or by_count).items():
            averages.setdefault(count, []).append(average(values))
    points = [(float(count), median(values)) for count, values in sorted(averages.items())]
    if not points:
        return LinearTime()
    # Errors are relative to the time: a line that fits 32 items must not be wrong for one.
    weights = [1 / max(seconds, 1e-6) ** 2 for _, seconds in points]
    fixed, slope = line_through(points, weights)
    if fixed < 0:
        xx = sum(weight * n * n for weight, (n, _) in zip(weights, points, strict=True))
        xy = sum(weight * n * seconds for weight, (n, seconds) in zip(weights, points, strict=True))
        return LinearTime(per_item_s=max(0.0, xy / xx))
    return LinearTime(fixed_s=fixed, per_item_s=slope)


def line_through(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Fits a line by weighted least squares: (value at 0, slope >= 0)."""
    total = sum(weights)
    middle = sum(weight * x for weight, (x, _) in zip(weights, points, strict=True)) / total
    level = sum(weight * y for weight, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(weight * (x - middle) ** 2 for weight, (x, _) in zip(weights, points, strict=True))
    joint = sum(weight * (x - middle) * (y - level) for weight, (x, y) in zip(weights, points, strict=True))
    slope = max(0.0, joint / spread) if spread else 0.0
    return level - slope * middle, slope


def interpolate(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the seconds at ``size``: linear between points, flat below the first, growing beyond the last.

    Args:
        curve: (size, seconds) points by increasing size, at least one.
    """
    if len(curve) == 1 or size <= curve[-1][0]:
        return estimators.interpolate(curve, size)
    (low, less), (high, more) = curve[-2:]
    # A step that was measured too fast must not make larger ones free.
    return more + max(0.0, (more - less) / (high - low)) * (size - high)


class Surface:
    """Seconds by two sizes: for each first size a curve over the second.

    Args:
        points: (first size, second size, seconds); at least one.
    """

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        curves: dict[float, list[tuple[float, float]]] = {}
        for first, second, seconds in points:
            curves.setdefault(first, []).append((second, seconds))
        assert curves, "a surface has points"
        self._curves = [(first, sorted(curve)) for first, curve in sorted(curves.items())]
        self._known: dict[tuple[float, float], float] = {}

    def __call__(self, first: float, second: float) -> float:
        key = first, second
        seconds = self._known.get(key)
        if seconds is None:
            across = [(size, interpolate(curve, second)) for size, curve in self._curves]
            seconds = self._known[key] = interpolate(across, first)
        return seconds
