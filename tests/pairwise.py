"""Grids of tests in which every pair of values meets, in place of every combination.

``@pairs(name=("llama", "qwen"), k=(1, 4), overlap=OVERLAPS)`` parametrizes a test. The keys of a column that
is a mapping name its values. A value may be a ``pytest.param`` with marks: a pair of values without marks
meets in a row without marks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

Column = Iterable[Any] | Mapping[str, Any]
Row = tuple[int, ...]


def pairs(where: Callable[..., bool] | None = None, /, **columns: Column) -> pytest.MarkDecorator:
    """Parametrizes with rows in which each pair of values meets.

    ``where`` takes a row's values by their names; False where they do not go together.
    """
    names = list(columns)
    values = [_params(column) for column in columns.values()]
    rows = list(_product(values))
    if where is not None:
        rows = [row for row in rows if where(**dict(zip(names, _plain(values, row), strict=True)))]
    unmarked = [row for row in rows if not any(param.marks for param in _at(values, row))]
    chosen = _cover(unmarked, set())
    chosen += _cover(rows, {pair for row in chosen for pair in _pairs_of(row)})
    return pytest.mark.parametrize(names, [_joined(_at(values, row)) for row in chosen])


def pairwise(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value per column, in which each pair of values of two columns meets."""
    values = [_params(column) for column in columns]
    return [tuple(_plain(values, row)) for row in _cover(list(_product(values)), set())]


def _cover(rows: list[Row], met: set[tuple[int, ...]]) -> list[Row]:
    """Greedily the rows that add most to the pairs of ``met``; deterministic, the first of equal ones."""
    # What a row adds only falls: the entry on top counts as soon as its number is up to date.
    heap = [(-len(_pairs_of(row) - met), place) for place, row in enumerate(rows)]
    heapq.heapify(heap)
    met = set(met)
    chosen: list[Row] = []
    while heap and heap[0][0]:
        _, place = heapq.heappop(heap)
        new = _pairs_of(rows[place]) - met
        if heap and (-len(new), place) > heap[0]:
            heapq.heappush(heap, (-len(new), place))
            continue
        met |= new
        chosen.append(rows[place])
    return sorted(chosen)


def _pairs_of(row: Row) -> set[tuple[int, ...]]:
    """Each value alone too, so that a grid of one column has all its values."""
    places = list(enumerate(row))
    return {first + second for first, second in itertools.combinations(places, 2)} | set(places)


def _params(column: Column) -> list[Any]:
    if isinstance(column, Mapping):
        return [pytest.param(value, id=name) for name, value in column.items()]
    is_param = type(pytest.param())
    return [value if isinstance(value, is_param) else pytest.param(value) for value in column]


def _product(values: list[list[Any]]) -> Iterator[Row]:
    return itertools.product(*(range(len(column)) for column in values))


def _at(values: list[list[Any]], row: Row) -> list[Any]:
    return [column[place] for column, place in zip(values, row, strict=True)]


def _plain(values: list[list[Any]], row: Row) -> list[Any]:
    return [param.values[0] for param in _at(values, row)]


def _joined(params: list[Any]) -> Any:
    """One set of parameters. Named values give the row its name only if all have one or are plain."""
    marks = [mark for param in params for mark in param.marks]
    words = [param.id or _word(param.values[0]) for param in params]
    row_id = None if None in words else "-".join(words)
    return pytest.param(*(param.values[0] for param in params), marks=marks, id=row_id)


def _word(value: Any) -> str | None:
    """How pytest names a plain value; None for another."""
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    return getattr(value, "__name__", None)
