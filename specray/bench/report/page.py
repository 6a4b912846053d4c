"""A report as a page of Markdown, from the tables that the terminal shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from specray.bench.report.provenance import provenance


def page(title: str, command: str, notes: Iterable[str], tables: Iterable[Table]) -> str:
    """A page: what wrote it, machine, commit and command, notes of a paragraph each, and tables.

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
    return "\n".join(_row(row) for row in rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
