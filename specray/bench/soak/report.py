"""Reports a soak: tables for people, JSON for machines, and what did not hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from specray.bench.soak.ledger import Judgement
from specray.bench.soak.run import Fault, SoakResult
from specray.bench.soak.schedule import FaultKind

MAX_GROWTH = 0.02
"""Share by which any process may grow after its warm-up."""
MIN_GROWTH_BYTES = 2 * 1024 * 1024
"""Bytes of growth that count: a heap's arenas come and go in steps of this size."""
_PAUSING = frozenset({FaultKind.TARGET_KILL, FaultKind.TARGET_STOP, FaultKind.ROUTER_KILL})
"""Faults after which nothing can go on at once."""
MAX_WAIT_S, MAX_PAUSE_S, MAX_AWAY_S = 2.0, 20.0, 40.0
"""Seconds for which a running stream may wait after a fault of a draft, of a target or Router, and of an
Ingress, which is replaced within 30."""
MAX_UNUSED_S = 15.0
"""Seconds from when all parts are back until the draft's tokens are verified again."""
MAX_LINES = 12
_MIB = 1024 * 1024
_DASH = "–"


def problems(result: SoakResult, *, max_growth: float = MAX_GROWTH) -> tuple[str, ...]:
    """Lists what did not hold; empty: everything held."""
    found = []
    for verdict, what in (
        (Judgement.FAILED, "failed requests"),
        (Judgement.WRONG, "requests with wrong tokens"),
    ):
        if number := result.ledger.count(verdict):
            found.append(f"{number} {what}")
    for role, blocks in result.blocks.items():
        if blocks is None and not result.is_interrupted:
            found.append(f"no reading of the {role}'s blocks in use")
        elif blocks:
            found.append(f"{blocks:g} leaked blocks of the {role}")
    grown = [
        growth
        for growth in result.growths
        if growth.share > max_growth and growth.num_bytes > MIN_GROWTH_BYTES
    ]
    found += [
        f"{growth.name} (process {growth.pid}) grew by {100 * growth.share:.1f} % in {growth.span_s:.0f} s"
        for growth in grown
    ]
    found += [text for fault in result.faults for text in _slowness(fault)]
    lost = sum(_is_not_whole(fault) for fault in result.faults)
    if lost:
        found.append(f"{lost} faults after which the service was not whole in time")
    if result.num_not_injected:
        found.append(f"{result.num_not_injected} faults for which no time was left")
    found += [f"{_name(fault)}: {fault.detail}" for fault in result.faults if not fault.is_done]
    return tuple(found)


def _is_not_whole(fault: Fault) -> bool:
    return fault.is_over and fault.whole_after_s is None


def _name(fault: Fault) -> str:
    return f"{fault.kind.value} at {fault.at_s:.0f} s"


def _slowness(fault: Fault) -> list[str]:
    """Lists what took longer after the fault than allowed."""
    found, what = [], _name(fault)
    allowed_s = MAX_PAUSE_S if fault.kind in _PAUSING else MAX_WAIT_S
    if fault.kind is FaultKind.INGRESS_HANG:
        allowed_s = MAX_AWAY_S
    if fault.wait_s is not None and fault.wait_s > allowed_s:
        found.append(f"{what}: a stream waited {fault.wait_s:.1f} s; allowed: {allowed_s:g}")
    if fault.speculation_after_s is not None and fault.parts_after_s is not None:
        unused_s = fault.speculation_after_s - fault.parts_after_s
        if unused_s > MAX_UNUSED_S:
            found.append(f"{what}: a draft was unused for {unused_s:.1f} s; allowed: {MAX_UNUSED_S:g}")
    return found


def soak_tables(result: SoakResult) -> Group:
    """Makes tables of requests, faults by kind, and processes by growth."""
    tables = (_requests(result), _faults(result.faults), _memory(result), _failures(result))
    return Group(*(table for table in tables if table.row_count))


def as_json(result: SoakResult, *, max_growth: float = MAX_GROWTH) -> dict[str, Any]:
    """Returns everything in the tables, and every fault and bad request by itself."""
    plan = result.plan
    return {
        "testbed": plan.bed.value,
        "seed": plan.seed,
        "duration_s": round(result.duration_s, 1),
        "is_interrupted": result.is_interrupted,
        "requests": result.ledger.counts,
        "ways": result.ledger.ways,
        "num_tokens": result.num_tokens,
        "leaked_blocks": result.blocks,
        "num_faults": len(result.faults),
        "num_not_injected": result.num_not_injected,
        "warm_s": _rounded(result.warm_s),
        "faults": [
            {
                "kind": fault.kind.value,
                "at_s": _rounded(fault.at_s),
                "hold_s": fault.hold_s,
                "detail": fault.detail,
                "parts_after_s": _rounded(fault.parts_after_s),
                "whole_after_s": _rounded(fault.whole_after_s),
                "longest_wait_s": _rounded(fault.wait_s),
                "speculation_after_s": _rounded(fault.speculation_after_s),
            }
            for fault in result.faults
        ],
        "memory": [
            {
                "pid": growth.pid,
                "name": growth.name,
                "span_s": _rounded(growth.span_s),
                "first_bytes": growth.first_bytes,
                "last_bytes": growth.last_bytes,
                "growth": round(growth.share, 4),
                "course_mib": [round(num_bytes / _MIB, 1) for num_bytes in growth.course_bytes],
            }
            for growth in result.growths
        ],
        "num_processes": result.num_processes,
        "not_judged": list(result.unjudged),
        "bad_requests": [
            {
                "verdict": entry.verdict.value,
                "case": entry.case_index,
                "way": entry.way.value,
                "reason": entry.reason,
                "started_s": _rounded(entry.started_s),
                "ended_s": _rounded(entry.ended_s),
            }
            for entry in result.ledger.bad
        ],
        "problems": list(problems(result, max_growth=max_growth)),
    }


def _requests(result: SoakResult) -> Table:
    table = Table(title=f"Requests in {result.duration_s:.0f} s on {result.plan.bed}")
    for name in (*result.ledger.counts, "tokens", "target blocks left", "draft blocks left"):
        table.add_column(name, justify="right")
    blocks = [_number(result.blocks.get(role), 0) for role in ("target", "draft")]
    table.add_row(*map(str, result.ledger.counts.values()), str(result.num_tokens), *blocks)
    return table


def _faults(faults: Sequence[Fault]) -> Table:
    table = Table(title="Faults; seconds, median / longest")
    for name in ("kind", "times", "a stream waited", "all parts after", "speculation after", "not whole"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind in FaultKind:
        group = [fault for fault in faults if fault.kind is kind]
        if group:
            table.add_row(
                kind.value,
                str(len(group)),
                _spread([fault.wait_s for fault in group]),
                _spread([fault.parts_after_s for fault in group]),
                _spread([fault.speculation_after_s for fault in group]),
                str(sum(_is_not_whole(fault) for fault in group)),
            )
    return table


def _memory(result: SoakResult) -> Table:
    table = Table(
        title=f"Memory of the {len(result.growths)} processes that lived long enough, "
        f"of {result.num_processes}",
        caption=f"Not long enough: {', '.join(result.unjudged)}" if result.unjudged else None,
    )
    for name in ("process", "watched s", "MiB after warm-up", "MiB at the end", "growth %"):
        table.add_column(name, justify="left" if name == "process" else "right")
    for growth in result.growths[:MAX_LINES]:
        table.add_row(
            f"{growth.name} {growth.pid}",
            f"{growth.span_s:.0f}",
            f"{growth.first_bytes / _MIB:.1f}",
            f"{growth.last_bytes / _MIB:.1f}",
            f"{100 * growth.share:+.1f}",
        )
    return table


def _failures(result: SoakResult) -> Table:
    table = Table(title=f"The first of {len(result.ledger.bad)} bad requests")
    for name in ("ended at s", "verdict", "way", "case", "reason"):
        table.add_column(name)
    for entry in result.ledger.bad[:MAX_LINES]:
        table.add_row(
            f"{entry.ended_s:.1f}", entry.verdict.value, entry.way.value, str(entry.case_index), entry.reason
        )
    return table


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} / {max(known):.1f}" if known else _DASH


def _number(value: float | None, digits: int) -> str:
    return _DASH if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
