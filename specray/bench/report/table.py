"""The table of ``specray bench serve``."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from specray.bench.core.report import DASH as _DASH
from specray.bench.core.report import number as _number
from specray.bench.core.report import spread as _spread
from specray.bench.core.turns import speedup_in_turns
from specray.bench.load.serve import ArmResult, ServeResult
from specray.bench.load.stats import ArmSummary


def serve_table(result: ServeResult) -> Table:
    """Makes a table with one column per arm, which fits a terminal; the first arm is the base."""
    plan = result.plan
    table = Table(
        title=f"{result.model}: {len(plan.prompts)} prompts, {plan.max_tokens} new tokens, "
        f"{plan.concurrency} at a time, temperature {plan.temperature:g}, {plan.num_repeats} passes in turns"
    )
    table.add_column("speculation")
    for arm in result.arms:
        table.add_column(arm.arm.name, justify="right")
    base = result.arms[0].summary
    for name, cell in _ROWS:
        cells = [cell(arm, arm.summary, base) for arm in result.arms]
        if any(value != _DASH for value in cells):
            table.add_row(name, *cells)
    return table


def category_table(result: ServeResult) -> Table:
    """Makes a table with one row per category of prompts; speeds are of single requests, summed."""
    table = Table(title="by category: speedup, acceptance length, acceptance rate")
    table.add_column("category")
    for arm in result.arms[1:]:
        table.add_column(arm.arm.name, justify="right")
    base = result.arms[0].categories
    for name in base:
        cells = [arm.categories.get(name) for arm in result.arms[1:]]
        table.add_row(name, *(_category_cell(cell, base[name]) for cell in cells))
    return table


def _category_cell(summary: ArmSummary | None, base: ArmSummary) -> str:
    if summary is None:
        return _DASH
    length, rate = _number(summary.mean_acceptance_length), _number(summary.acceptance_rate)
    return f"{_speedup(summary, base)}  {length}  {rate}"


def _speedup(summary: ArmSummary, base: ArmSummary) -> str:
    return f"{summary.tokens_per_s / base.tokens_per_s:.2f}x" if base.tokens_per_s else _DASH


def _speedup_in_turns(summary: ArmSummary, base: ArmSummary) -> str:
    found = speedup_in_turns(summary.tokens_per_s_of_passes, base.tokens_per_s_of_passes)
    return _DASH if found is None else f"{found[0]:.3f} ± {found[1]:.3f}"


def _last_server(arm: ArmResult, name: str) -> float | None:
    """Returns the median over the passes of one of the server's own figures."""
    values = sorted(value for stats in arm.server if (value := getattr(stats, name)) is not None)
    return values[len(values) // 2] if values else None


Cell = Callable[[ArmResult, ArmSummary, ArmSummary], str]

_ROWS: tuple[tuple[str, Cell], ...] = (
    ("tokens/s", lambda arm, summary, base: _number(summary.tokens_per_s, 1)),
    ("speedup", lambda arm, summary, base: _speedup(summary, base)),
    ("  pass by pass", lambda arm, summary, base: _speedup_in_turns(summary, base)),
    ("TTFT ms, p50 / p90 / p99", lambda arm, summary, base: _spread(summary.ttft_ms)),
    ("ITL ms, p50 / p90 / p99", lambda arm, summary, base: _spread(summary.itl_ms)),
    ("TPOT ms, p50 / p90 / p99", lambda arm, summary, base: _spread(summary.tpot_ms)),
    ("acceptance rate", lambda arm, summary, base: _number(summary.acceptance_rate)),
    ("mean acceptance length", lambda arm, summary, base: _number(summary.mean_acceptance_length)),
    ("hit rate", lambda arm, summary, base: _number(_last_server(arm, "hit_rate"))),
    (
        "round overhead ms, p50",
        lambda arm, summary, base: _number(_last_server(arm, "round_overhead_ms_p50")),
    ),
    ("failed requests", lambda arm, summary, base: str(summary.num_failed)),
)
