"""Tables of a run of ``specray bench overload``."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from specray.bench.core.report import DASH as _DASH
from specray.bench.core.report import spread as _spread
from specray.bench.load.overload import OverloadResult, Phase

_MIB = 1024 * 1024
_MIN_SHOWN_BYTES = 32 * _MIB


def overload_table(result: OverloadResult) -> Table:
    """Makes a table of both phases side by side."""
    plan = result.plan
    table = Table(
        title=f"{result.model}: capacity {result.capacity_per_s:.2f} requests/s of {plan.max_tokens} tokens "
        f"({plan.concurrency} at a time), offered {result.offered_per_s:.1f}/s for {plan.duration_s:g} s"
    )
    table.add_column("")
    table.add_column("capacity", justify="right")
    table.add_column(f"{plan.factor:g} times", justify="right")
    table.add_column("ratio", justify="right")
    ratios = {"ITL ms, p50 / p90 / p99": result.itl_ratio, "TPOT ms, p50 / p90 / p99": result.tpot_ratio}
    for name, cell in _ROWS:
        ratio = ratios.get(name)
        shown = _DASH if ratio is None else f"{ratio:.2f}"
        table.add_row(name, cell(result.capacity), cell(result.overload), shown if name in ratios else "")
    for kind in sorted(result.capacity.errors | result.overload.errors):
        table.add_row(
            f"failed: {kind[:60]}",
            str(result.capacity.errors.get(kind, 0)),
            str(result.overload.errors.get(kind, 0)),
            "",
        )
    return table


def class_table(result: OverloadResult) -> Table | None:
    """Makes a table of the requests with a service level beside those without; None where none has one."""
    if not result.plan.slo:
        return None
    wanted = ", ".join(f"{name} {value:g}" for name, value in result.plan.slo.items())
    table = Table(title=f"service level ({wanted}) of {result.plan.slo_share:.0%} of the requests")
    for name in (
        "load",
        "requests",
        "answered",
        "TPOT ms, p50 / p90 / p99",
        "TTFT ms, p50 / p90 / p99",
        "kept",
    ):
        table.add_column(name, justify="left" if name in ("load", "requests") else "right")
    for load, phase in (("capacity", result.capacity), (f"{result.plan.factor:g} times", result.overload)):
        for label, own in phase.classes.items():
            kept = _DASH if own.attainment is None else f"{own.attainment:.1%}"
            cells = (str(own.num_admitted), _spread(own.tpot_ms), _spread(own.ttft_ms), kept)
            table.add_row(load, label, *cells)
    return table


def memory_table(result: OverloadResult) -> Table | None:
    """Makes a table of each process's memory around the overload; None if they are on another machine."""
    if not result.memory_before:
        return None
    table = Table(title="resident memory, MiB")
    for name in ("process", "before", "at a quarter", "after", "growth since"):
        table.add_column(name, justify="left" if name == "process" else "right")
    early = {each.pid: each.rss_bytes for each in result.memory_early}
    after = {each.pid: each.rss_bytes for each in result.memory_after}
    for each in result.memory_before:
        if each.rss_bytes >= _MIN_SHOWN_BYTES:
            table.add_row(each.name, *_cells(each.rss_bytes, early.get(each.pid), after.get(each.pid)))
    total = sum(each.rss_bytes for each in result.memory_before)
    table.add_row("all", *_cells(total, sum(early.values()), sum(after.values())))
    return table


def _cells(before: int, early: int | None, after: int | None) -> tuple[str, str, str, str]:
    shown = [_DASH if value is None else f"{value / _MIB:.0f}" for value in (before, early, after)]
    growth = _DASH if not early or after is None else f"{100 * (after - early) / early:+.1f} %"
    return shown[0], shown[1], shown[2], growth


def _in_time(phase: Phase) -> str:
    if not phase.num_refused:
        return _DASH
    share = 100 * phase.num_refused_in_time / phase.num_refused
    return f"{share:.1f} %"


_ROWS: tuple[tuple[str, Callable[[Phase], str]], ...] = (
    ("sent", lambda phase: str(phase.num_sent)),
    ("answered", lambda phase: str(phase.num_admitted)),
    ("refused (429)", lambda phase: str(phase.num_refused)),
    ("  with Retry-After", lambda phase: str(phase.num_refused_with_retry_after)),
    ("  within 100 ms", _in_time),
    ("  ms, p50 / p90 / p99", lambda phase: _spread(phase.refusal_ms)),
    (
        "  ms, slowest",
        lambda phase: _DASH if phase.slowest_refusal_ms is None else f"{phase.slowest_refusal_ms:.1f}",
    ),
    ("ITL ms, p50 / p90 / p99", lambda phase: _spread(phase.itl_ms)),
    ("TPOT ms, p50 / p90 / p99", lambda phase: _spread(phase.tpot_ms)),
    ("TTFT ms, p50 / p90 / p99", lambda phase: _spread(phase.ttft_ms)),
    ("not sent: too many under way", lambda phase: str(phase.num_not_sent)),
    ("generator late by at most, ms", lambda phase: f"{phase.latest_ms:.1f}"),
)
