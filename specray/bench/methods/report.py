"""The tables and the chart of ``specray bench methods``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from specray.bench.core.chart import Panel, Series, draw
from specray.bench.core.report import grid_of, number, page, table_of
from specray.bench.methods.method import ALL, SERVICE, MethodRow

_DEPTHS = "acceptance by depth"
_COLORS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def methods_tables(rows: Sequence[MethodRow]) -> list[Table]:
    """One table per temperature of all prompts together, and one of the acceptance by category."""
    tables: list[Table] = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        here = [row for row in rows if row.temperature == temperature]
        tables.append(_all_table(temperature, [row for row in here if row.category == ALL]))
        if any(row.category != ALL for row in here):
            tables.append(_category_table(temperature, here))
        if len({row.method for row in here}) > 1 and any(row.method == SERVICE for row in here):
            tables.append(_choice_table(temperature, here))
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


def _choice_table(temperature: float, rows: Sequence[MethodRow]) -> Table:
    places = dict.fromkeys(row.category for row in rows)
    cells: list[list[str]] = []
    for category in places:
        timed = {row.method: row.tokens_per_s or 0.0 for row in rows if row.category == category}
        own = timed.pop(SERVICE)
        best = max(timed, key=lambda name: timed[name])
        share = own / timed[best] if timed[best] else None
        cells.append([category, best, number(timed[best], 1), number(own, 1), number(share)])
    title = f"temperature {temperature:g}: the service's choice"
    return grid_of(title, ["category", "best method", "tokens/s", "service", "of the best"], cells)


def _all_table(temperature: float, rows: Sequence[MethodRow]) -> Table:
    columns: dict[str, Callable[[MethodRow], object]] = {
        "method": lambda row: row.method,
        "tokens/s": lambda row: number(row.tokens_per_s, 1),
        "speedup": lambda row: row.speedup,
        "tokens/round": lambda row: row.tokens_per_round,
        "acceptance length": lambda row: row.acceptance_length,
        "nodes": lambda row: number(row.nodes_per_step, 1),
        "draft ms": lambda row: row.draft_ms,
        "equal": lambda row: f"{row.num_equal}/{row.num_outputs}",
        _DEPTHS: lambda row: " ".join(f"{share:.2f}" for share in row.acceptance_by_depth[:6]),
    }
    return table_of(f"temperature {temperature:g}, all prompts", columns, rows, text=(_DEPTHS,))


def _category_table(temperature: float, rows: Sequence[MethodRow]) -> Table:
    methods = list(dict.fromkeys(row.method for row in rows))
    by_place = {(row.category, row.method): row for row in rows}
    title = f"temperature {temperature:g}: tokens per round, speedup"
    cells = {
        category: [by_place[category, method] for method in methods]
        for category in dict.fromkeys(row.category for row in rows)
    }
    return grid_of(
        title,
        ["category", *methods],
        (
            [name, *(f"{cell.tokens_per_round:.2f}  {number(cell.speedup)}" for cell in own)]
            for name, own in cells.items()
        ),
    )
