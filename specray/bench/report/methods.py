"""The tables and the chart of ``specray bench methods``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from specray.bench.core.chart import Panel, Series, draw
from specray.bench.core.report import page
from specray.bench.methods.method import ALL, MethodRow

_DASH = "–"
_COLORS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def methods_tables(rows: Sequence[MethodRow]) -> list[Table]:
    """One table per temperature of all prompts together, and one of the acceptance by category."""
    tables: list[Table] = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        here = [row for row in rows if row.temperature == temperature]
        tables.append(_all_table(temperature, [row for row in here if row.category == ALL]))
        if any(row.category != ALL for row in here):
            tables.append(_category_table(temperature, here))
    return tables


def methods_page(rows: Sequence[MethodRow], *, chart: str | None) -> str:
    """The tables as a page of Markdown.

    Args:
        chart: path of the chart from the page; None: there is none.
    """
    notes = [
        "*speedup*: median over the turns of tokens/s over those of plain decoding in the same turn. "
        "*tokens/round*: output tokens per step of the target. *acceptance length*: 1 + accepted tokens per "
        "step that had draft tokens, *nodes* how many it had. *draft ms*: of the draft model per step of the "
        "target. *equal*: outputs that are plain decoding's; products of another number of rows round "
        "differently, so in bfloat16 not all are."
    ]
    if chart is not None:
        notes.append(f"![acceptance by depth]({chart})")
    return page("Methods of drafting", "specray bench methods", notes, methods_tables(rows))


def methods_chart(rows: Sequence[MethodRow]) -> str:
    """Acceptance by depth, a panel per temperature, as SVG."""
    methods = list(dict.fromkeys(row.method for row in rows))
    panels = [
        Panel(
            f"temperature {temperature:g}",
            "draft tokens accepted before, plus one",
            "acceptance",
            tuple(
                Series(
                    row.method,
                    _COLORS[methods.index(row.method) % len(_COLORS)],
                    ":" in row.method,
                    tuple((depth + 1.0, share) for depth, share in enumerate(row.acceptance_by_depth)),
                )
                for row in rows
                if row.temperature == temperature and row.category == ALL and row.acceptance_by_depth
            ),
        )
        for temperature in dict.fromkeys(row.temperature for row in rows)
    ]
    return draw("Acceptance by depth", panels, num_columns=2)


def _number(value: float | None, digits: int = 2) -> str:
    return _DASH if value is None else f"{value:.{digits}f}"


def _all_table(temperature: float, rows: Sequence[MethodRow]) -> Table:
    table = Table(title=f"temperature {temperature:g}, all prompts")
    table.add_column("method")
    for name in ("tokens/s", "speedup", "tokens/round", "acceptance length", "nodes", "draft ms", "equal"):
        table.add_column(name, justify="right")
    table.add_column("acceptance by depth")
    for row in rows:
        table.add_row(
            row.method,
            _number(row.tokens_per_s, 1),
            _number(row.speedup),
            f"{row.tokens_per_round:.2f}",
            _number(row.acceptance_length),
            _number(row.nodes_per_step, 1),
            f"{row.draft_ms:.2f}",
            f"{row.num_equal}/{row.num_outputs}",
            " ".join(f"{share:.2f}" for share in row.acceptance_by_depth[:6]),
        )
    return table


def _category_table(temperature: float, rows: Sequence[MethodRow]) -> Table:
    """Tokens per round and speedup of each method, a row per category."""
    methods = list(dict.fromkeys(row.method for row in rows))
    by_place = {(row.category, row.method): row for row in rows}
    table = Table(title=f"temperature {temperature:g}: tokens per round, speedup")
    table.add_column("category")
    for method in methods:
        table.add_column(method, justify="right")
    for category in dict.fromkeys(row.category for row in rows):
        cells = [by_place[category, method] for method in methods]
        table.add_row(category, *(f"{cell.tokens_per_round:.2f}  {_number(cell.speedup)}" for cell in cells))
    return table
