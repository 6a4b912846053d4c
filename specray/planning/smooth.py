"""Fits curves to samples: mean step times by size, which never fall.

Means, not medians: a step that was held up is part of service, and rates follow from means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple, TypeVar

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


def isotonic(values: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the nearest sequence that never falls, by pooling neighbours that do.

    Args:
        values: (value, weight > 0) pairs.
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in values:
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            level, more, count = pools.pop()
            total = more + pool[1]
            pool = ((level * more + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return [level for level, _, count in pools for _ in range(count)]


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
