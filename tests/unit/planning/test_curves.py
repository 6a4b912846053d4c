"""Tests of curves through samples: averages that resist outliers, and curves that never fall."""

from __future__ import annotations

import pytest

from specray.control.estimators import isotonic
from specray.planning.curves import Point, average, cell_points, fit_linear, rising
from specray.planning.profile import LinearTime


def test_average_counts_a_hiccup_for_three_times_the_median() -> None:
    assert average([1.0, 1.0, 1.0, 2.0]) == 1.25
    assert average([1.0, 1.0, 1.0, 100.0]) == (3 + 3) / 4
    assert average([7.0]) == 7.0


def test_values_that_fall_are_pooled_by_their_weights() -> None:
    assert isotonic([(1.0, 1), (4.0, 1), (1.0, 2), (5.0, 1)]) == [1.0, 2.0, 2.0, 5.0]
    assert isotonic([(3.0, 1), (2.0, 1), (1.0, 1)]) == [2.0, 2.0, 2.0]
    assert isotonic([]) == []


def test_no_point_takes_longer_than_a_larger_or_a_deeper_one() -> None:
    points = [Point(1, 1, 4.0, 1), Point(2, 1, 2.0, 1), Point(1, 3, 1.0, 1), Point(2, 3, 5.0, 1)]
    assert {(one.size, one.depth): one.seconds for one in rising(points)} == {
        (1, 1): 2.0,
        (1, 3): 2.0,
        (2, 1): 3.0,
        (2, 3): 5.0,
    }


def test_a_cell_is_the_median_of_its_passes_averages() -> None:
    def points(*passes: list[float]) -> list[Point]:
        return cell_points(passes, place=lambda _: (4.0, 2), value=lambda seconds: seconds)

    assert points([1.0, 1.0, 2.5], [9.0] * 3, [5.0] * 3) == [Point(4.0, 2, 5.0, 9)]


def test_cells_with_few_samples_count_only_where_no_cell_has_more() -> None:
    def points(*sizes: float) -> list[float]:
        return [one.size for one in cell_points([sizes], place=lambda size: (size, 0), value=lambda _: 1.0)]

    assert points(1, 1, 1, 4, 4) == [1]
    assert points(1, 4) == [1, 4]


def test_line_through_averages_has_no_negative_part() -> None:
    exact = fit_linear([[(count, 1.0 + 0.5 * count) for count in (1, 2, 4) for _ in range(3)]])
    assert (exact.fixed_s, exact.per_item_s) == (pytest.approx(1.0), pytest.approx(0.5))
    falling = fit_linear([[(1, 2.0), (4, 1.0)]])
    assert falling.per_item_s == 0.0 and 1.0 <= falling.fixed_s <= 2.0
    steep = fit_linear([[(1, 1.0), (2, 5.0)]])
    assert steep.fixed_s == 0.0 and steep.per_item_s > 1.0
    assert fit_linear([[]]) == LinearTime()


def test_the_median_of_the_passes_counts() -> None:
    assert fit_linear([[(1, 4.0)], [(1, 9.0)], [(1, 7.0)]]).of(1) == pytest.approx(7.0)
