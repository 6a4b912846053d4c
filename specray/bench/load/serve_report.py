"""The table of ``specray bench serve``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from specray.bench.core.report import DASH, grid_of, number, spread, values_of
from specray.bench.core.turns import speedup_in_turns
from specray.bench.load.serve import ArmResult, ServeResult
from specray.bench.load.stats import ArmSummary


def serve_table(result: ServeResult) -> Table:
    """Makes a table with one column per arm, which fits a terminal; the first arm is the base."""
    plan = result.plan
    title = (
        f"{result.model}: {result.num_prompts} prompts, {plan.max_tokens} new tokens, "
        f"{plan.concurrency} at a time, temperature {plan.temperature:g}, {plan.num_repeats} passes in turns"
    )
    base = result.arms[0].summary
    rows = [(name, *(cell(arm, arm.summary, base) for arm in result.arms)) for name, cell in _ROWS.items()]
    known = [row for row in rows if any(value != DASH for value in row[1:])]
    return grid_of(title, ["speculation", *(arm.arm.name for arm in result.arms)], known)


def category_table(result: ServeResult) -> Table:
    """Makes a table with one row per category of prompts; speeds are of single requests, summed."""
    base, *others = (arm.categories for arm in result.arms)
    rows = [(name, *(_category_cell(own.get(name), base[name]) for own in others)) for name in base]
    headings = ["category", *(arm.arm.name for arm in result.arms[1:])]
    return grid_of("by category: speedup, acceptance length, acceptance rate", headings, rows)


def serve_json(result: ServeResult) -> dict[str, Any]:
    """Everything but the prompts."""
    return {
        "model": result.model,
        "plan": values_of(result.plan),
        "arms": [
            {
                **values_of(arm.summary),
                "speculation": arm.arm.changes["speculation"],
                "server": [values_of(stats) for stats in arm.server],
                "errors": arm.errors,
                "categories": {name: values_of(one) for name, one in arm.categories.items()},
            }
            for arm in result.arms
        ],
    }


def _category_cell(summary: ArmSummary | None, base: ArmSummary) -> str:
    if summary is None:
        return DASH
    length, rate = number(summary.mean_acceptance_length), number(summary.acceptance_rate)
    return f"{_speedup(summary, base)}  {length}  {rate}"


def _speedup(summary: ArmSummary, base: ArmSummary) -> str:
    return f"{summary.tokens_per_s / base.tokens_per_s:.2f}x" if base.tokens_per_s else DASH


def _speedup_in_turns(summary: ArmSummary, base: ArmSummary) -> str:
    found = speedup_in_turns(summary.tokens_per_s_of_passes, base.tokens_per_s_of_passes)
    return DASH if found is None else f"{found[0]:.3f} ± {found[1]:.3f}"


def _median(arm: ArmResult, name: str) -> float | None:
    values = sorted(value for stats in arm.server if (value := getattr(stats, name)) is not None)
    return values[len(values) // 2] if values else None


Cell = Callable[[ArmResult, ArmSummary, ArmSummary], str]

_ROWS: dict[str, Cell] = {
    "tokens/s": lambda arm, summary, base: number(summary.tokens_per_s, 1),
    "speedup": lambda arm, summary, base: _speedup(summary, base),
    "  pass by pass": lambda arm, summary, base: _speedup_in_turns(summary, base),
    "TTFT ms, p50 / p90 / p99": lambda arm, summary, base: spread(summary.ttft_ms),
    "ITL ms, p50 / p90 / p99": lambda arm, summary, base: spread(summary.itl_ms),
    "TPOT ms, p50 / p90 / p99": lambda arm, summary, base: spread(summary.tpot_ms),
    "acceptance rate": lambda arm, summary, base: number(summary.acceptance_rate),
    "mean acceptance length": lambda arm, summary, base: number(summary.mean_acceptance_length),
    "hit rate": lambda arm, summary, base: number(_median(arm, "hit_rate")),
    "round overhead ms, p50": lambda arm, summary, base: number(_median(arm, "round_overhead_ms_p50")),
    "failed requests": lambda arm, summary, base: str(summary.num_failed),
}
