"""The report of a measurement: tables for the terminal, the same as Markdown, and values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specray.bench.core.figures import Percentiles
from specray.bench.core.provenance import provenance

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.table import Table

T = TypeVar("T")

DASH = "–"
"""Stands for a figure that was not measured."""


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def spread(values: Percentiles | None) -> str:
    """p50 / p90 / p99."""
    return DASH if values is None else f"{values.p50:.1f} / {values.p90:.1f} / {values.p99:.1f}"


def table_of(
    title: str,
    columns: Mapping[str, Callable[[T], object]],
    rows: Iterable[T],
    *,
    text: Collection[str] = (),
    caption: str | None = None,
    is_narrow: bool = False,
) -> Table:
    """Makes a table with a row for each item.

    Args:
        columns: what stands in a column, by its heading.
        text: headings of columns of text, as the first one is; figures stand to the right.
        is_narrow: no lines between the columns.
    """
    made = empty_table(title, columns, text=text, caption=caption, is_narrow=is_narrow)
    for row in rows:
        made.add_row(*(_cell(value(row)) for value in columns.values()))
    return made


def empty_table(
    title: str,
    headings: Iterable[str],
    *,
    text: Collection[str] = (),
    caption: str | None = None,
    is_narrow: bool = False,
) -> Table:
    """Makes a table to which rows of text are to be added; see ``table_of``."""
    # Here, since what measures a GPU has to import without rich.
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    narrow: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0} if is_narrow else {}
    made = Table(title=title, caption=caption, **narrow)
    for index, heading in enumerate(headings):
        is_text = index == 0 or heading in text
        made.add_column(heading, justify="left" if is_text else "right", no_wrap=is_narrow)
    return made


def grid_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], **options: Any) -> Table:
    """Makes a table of rows of cells; options as of ``table_of``."""
    made = empty_table(title, headings, **options)
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> str:
    if value is None:
        return DASH
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def values_of(record: DataclassInstance, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a record as plain JSON, but for some of them."""
    return {key: _plain(value) for key, value in asdict(record).items() if key not in without}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value.value if isinstance(value, Enum) else value


def page(title: str, command: str, notes: Iterable[str], tables: Iterable[Table]) -> str:
    """A page of Markdown: what wrote it, machine, commit and command, notes of a paragraph each, and tables.

    Args:
        command: name of the command that measured, such as ``specray bench methods``.
    """
    parts = [f"# {title}", f"> Written by `{command}`.", "\n".join(provenance()), *notes]
    parts += [part for table in tables for part in (f"## {table.title}", markdown_table(table))]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """The rows of a terminal's table; columns to the right stay there."""
    columns = list(table.columns)
    marks = ["---:" if column.justify == "right" else "---" for column in columns]
    cells = zip(*(column.cells for column in columns), strict=True)
    rows = [
        [str(column.header) for column in columns],
        marks,
        *([str(cell) for cell in row] for row in cells),
    ]
    return "\n".join(_markdown_row(row) for row in rows)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
