"""Tables of a run of ``specray bench overload``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from specray.bench.core.report import DASH, grid_of, number, spread, values_of
from specray.bench.load.overload import OverloadResult, Phase

_MIB = 1024 * 1024


def overload_tables(result: OverloadResult) -> list[Table]:
    """Both loads, the requests with a service level, and memory, as far as they were measured."""
    tables = [_phase_table(result)]
    if result.plan.slo:
        tables.append(_class_table(result))
    if result.memory_before:
        tables.append(_memory_table(result))
    return tables


def overload_json(result: OverloadResult) -> dict[str, Any]:
    return {**values_of(result), "itl_ratio": result.itl_ratio, "tpot_ratio": result.tpot_ratio}


def _phase_table(result: OverloadResult) -> Table:
    plan = result.plan
    title = (
        f"{result.model}: capacity {result.capacity_per_s:.2f} requests/s of {plan.max_tokens} tokens "
        f"({plan.concurrency} at a time), offered {result.offered_per_s:.1f}/s for {plan.duration:g} s"
    )
    ratios = {"ITL ms, p50 / p90 / p99": result.itl_ratio, "TPOT ms, p50 / p90 / p99": result.tpot_ratio}
    rows: list[tuple[object, ...]] = [
        (name, cell(result.capacity), cell(result.overload), ratios.get(name) if name in ratios else "")
        for name, cell in _ROWS.items()
    ]
    rows += [
        (f"failed: {kind[:60]}", *(str(phase.errors.get(kind, 0)) for phase in _phases(result).values()), "")
        for kind in sorted(result.capacity.errors | result.overload.errors)
    ]
    return grid_of(title, ["", *_phases(result), "ratio"], rows)


def _phases(result: OverloadResult) -> dict[str, Phase]:
    return {"capacity": result.capacity, f"{result.plan.factor:g} times": result.overload}


def _class_table(result: OverloadResult) -> Table:
    wanted = ", ".join(f"{name} {value:g}" for name, value in result.plan.slo.items())
    rows = [
        (
            load,
            label,
            own.num_admitted,
            spread(own.tpot_ms),
            spread(own.ttft_ms),
            DASH if own.attainment is None else f"{own.attainment:.1%}",
        )
        for load, phase in _phases(result).items()
        for label, own in phase.classes.items()
    ]
    times = [f"{name} ms, p50 / p90 / p99" for name in ("TPOT", "TTFT")]
    return grid_of(
        f"service level ({wanted}) of {result.plan.slo_share:.0%} of the requests",
        ["load", "requests", "answered", *times, "kept"],
        rows,
        text=("requests",),
    )


def _memory_table(result: OverloadResult) -> Table:
    early, after = (
        {each.pid: each.rss_bytes for each in memory} for memory in (result.memory_early, result.memory_after)
    )
    rows = [
        (each.name, *_cells(each.rss_bytes, early.get(each.pid), after.get(each.pid)))
        for each in result.memory_before
        if each.rss_bytes >= 32 * _MIB
    ]
    total = sum(each.rss_bytes for each in result.memory_before)
    rows.append(("all", *_cells(total, sum(early.values()), sum(after.values()))))
    headings = ["process", "before", "at a quarter", "after", "growth since"]
    return grid_of("resident memory, MiB", headings, rows)


def _cells(before: int, early: int | None, after: int | None) -> tuple[str, str, str, str]:
    shown = [DASH if value is None else f"{value / _MIB:.0f}" for value in (before, early, after)]
    growth = DASH if not early or after is None else f"{100 * (after - early) / early:+.1f} %"
    return shown[0], shown[1], shown[2], growth


_ROWS: dict[str, Callable[[Phase], object]] = {
    "sent": lambda phase: phase.num_sent,
    "answered": lambda phase: phase.num_admitted,
    "refused (429)": lambda phase: phase.num_refused,
    "  with Retry-After": lambda phase: phase.num_refused_with_retry_after,
    "  within 100 ms": lambda phase: (
        f"{100 * phase.num_refused_in_time / phase.num_refused:.1f} %" if phase.num_refused else DASH
    ),
    "  ms, p50 / p90 / p99": lambda phase: spread(phase.refusal_ms),
    "  ms, slowest": lambda phase: number(phase.slowest_refusal_ms, 1),
    "ITL ms, p50 / p90 / p99": lambda phase: spread(phase.itl_ms),
    "TPOT ms, p50 / p90 / p99": lambda phase: spread(phase.tpot_ms),
    "TTFT ms, p50 / p90 / p99": lambda phase: spread(phase.ttft_ms),
    "not sent: too many under way": lambda phase: phase.num_not_sent,
    "generator late by at most, ms": lambda phase: number(phase.latest_ms, 1),
}
