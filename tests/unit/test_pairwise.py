from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.pairwise import pairs, pairwise


def rows_of(mark: pytest.MarkDecorator) -> list[Any]:
    return list(mark.args[1])


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 3), (6, 10, 4), (2, 2, 2, 2, 2), (3, 1, 5, 4)])
def test_every_pair_of_values_meets_in_few_rows(sizes: tuple[int, ...]) -> None:
    columns = [[(column, value) for value in range(size)] for column, size in enumerate(sizes)]
    rows = pairwise(*columns)
    for two in itertools.combinations(range(len(sizes)), min(2, len(sizes))):
        wanted = set(itertools.product(*(columns[column] for column in two)))
        assert {tuple(row[column] for column in two) for row in rows} == wanted
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.5 * largest[0] * largest[-1] + 3 if len(sizes) > 1 else len(rows) == sizes[0]
    assert len(set(rows)) == len(rows)


def test_values_that_do_not_go_together_do_not_meet() -> None:
    mark = pairs(lambda k, tree, name: not (k == 1 and tree), k=(1, 2, 3), tree=(False, True), name="ab")
    assert mark.args[0] == ["k", "tree", "name"]
    met = {(row.values[0], row.values[1]) for row in rows_of(mark)}
    assert met == {(1, False), (2, False), (2, True), (3, False), (3, True)}


def test_a_pair_of_unmarked_values_meets_in_an_unmarked_row() -> None:
    slow = pytest.param("c", marks=pytest.mark.slow)
    rows = rows_of(pairs(name=("a", "b", slow), k=(1, 2), overlap=("on", "off", "auto")))
    unmarked = [row.values for row in rows if not row.marks]
    assert {(name, k) for name, k, _ in unmarked} == set(itertools.product("ab", (1, 2)))
    assert {(k, overlap) for _, k, overlap in unmarked} == set(
        itertools.product((1, 2), ("on", "off", "auto"))
    )
    marked = [row.values for row in rows if row.marks]
    assert {(name, overlap) for name, _, overlap in marked} == {("c", "on"), ("c", "off"), ("c", "auto")}


def test_a_row_is_named_by_its_values() -> None:
    named = rows_of(pairs(shape={"wide": [8, 2], "tall": [2, 8]}, k=(1, "auto")))
    assert {row.id for row in named} == {"wide-1", "wide-auto", "tall-1", "tall-auto"}
    assert next(row for row in named if row.id == "tall-1").values == ([2, 8], 1)
    assert {row.id for row in rows_of(pairs(shape=([1], [2]), k=(1,)))} == {None}
