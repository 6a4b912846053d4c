"""Reports a soak: tables for people, JSON for machines, and what did not hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from specray.bench.core.report import DASH, grid_of, number, table_of, values_of
from specray.bench.soak.ledger import Entry, Judgement
from specray.bench.soak.memory import Growth
from specray.bench.soak.run import Fault, SoakResult
from specray.bench.soak.schedule import FaultKind

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_AWAY = frozenset({FaultKind.INGRESS_HANG, FaultKind.MODEL_CHURN})
"""Faults after which an Ingress or a model is started anew."""
_PAUSING = frozenset({FaultKind.TARGET_KILL, FaultKind.TARGET_STOP, FaultKind.ROUTER_KILL})
"""Faults after which nothing can go on at once."""
MAX_WAIT_S, MAX_PAUSE_S, MAX_AWAY_S = 2.0, 20.0, 40.0
"""Seconds for which a running stream may wait after a fault of a draft, of a target or Router, and of an
Ingress, which is replaced within 30, or a whole model."""
MAX_UNUSED_S = 15.0
"""Seconds from when all parts are back until the draft's tokens are verified again."""
MAX_LINES = 12
_MIB = 1024 * 1024


def problems(result: SoakResult) -> tuple[str, ...]:
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
        # Bytes of growth that count: a heap's arenas come and go in steps of this size.
        if growth.share > result.plan.max_growth and growth.num_bytes > 2 * 1024 * 1024
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
    found, what = [], _name(fault)
    allowed_s = MAX_PAUSE_S if fault.kind in _PAUSING else MAX_WAIT_S
    if fault.kind in _AWAY:
        allowed_s = MAX_AWAY_S
    if fault.wait_s is not None and fault.wait_s > allowed_s:
        found.append(f"{what}: a stream waited {fault.wait_s:.1f} s; allowed: {allowed_s:g}")
    if fault.speculation_after_s is not None and fault.parts_after_s is not None:
        unused_s = fault.speculation_after_s - fault.parts_after_s
        if unused_s > MAX_UNUSED_S:
            found.append(f"{what}: a draft was unused for {unused_s:.1f} s; allowed: {MAX_UNUSED_S:g}")
    return found


def soak_tables(result: SoakResult) -> Group:
    tables = (_requests(result), _faults(result.faults), _memory(result), _failures(result))
    return Group(*(table for table in tables if table.row_count))


def soak_json(result: SoakResult) -> dict[str, Any]:
    """Everything in the tables, and every fault and bad request by itself."""
    plan = result.plan
    return {
        "testbed": plan.testbed.value,
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
            _renamed(fault, ("is_over", "is_done"), wait_s="longest_wait_s") for fault in result.faults
        ],
        "memory": [
            {
                **_renamed(growth, ("course_bytes",)),
                "growth": round(growth.share, 4),
                "course_mib": [round(num_bytes / _MIB, 1) for num_bytes in growth.course_bytes],
            }
            for growth in result.growths
        ],
        "num_processes": result.num_processes,
        "not_judged": list(result.unjudged),
        "bad_requests": [_renamed(entry, (), case_index="case") for entry in result.ledger.bad],
        "problems": list(problems(result)),
    }


def _renamed(record: DataclassInstance, without: Collection[str], **names: str) -> dict[str, Any]:
    """The fields of a record with seconds rounded, some of them under other names."""
    return {names.get(key, key): _rounded(value) for key, value in values_of(record, without=without).items()}


def _requests(result: SoakResult) -> Table:
    headings = [*result.ledger.counts, "tokens", "target blocks left", "draft blocks left"]
    blocks = [number(result.blocks.get(role), 0) for role in ("target", "draft")]
    row = (*result.ledger.counts.values(), result.num_tokens, *blocks)
    return grid_of(f"Requests in {result.duration_s:.0f} s on {result.plan.testbed}", headings, [row])


def _faults(faults: Sequence[Fault]) -> Table:
    groups = {kind: [fault for fault in faults if fault.kind is kind] for kind in FaultKind}
    columns: dict[str, Callable[[FaultKind], object]] = {
        "kind": lambda kind: kind.value,
        "times": lambda kind: len(groups[kind]),
        "a stream waited": lambda kind: _spread([fault.wait_s for fault in groups[kind]]),
        "all parts after": lambda kind: _spread([fault.parts_after_s for fault in groups[kind]]),
        "speculation after": lambda kind: _spread([fault.speculation_after_s for fault in groups[kind]]),
        "not whole": lambda kind: sum(_is_not_whole(fault) for fault in groups[kind]),
    }
    kinds = [kind for kind in FaultKind if groups[kind]]
    return table_of("Faults; seconds, median / longest", columns, kinds)


def _memory(result: SoakResult) -> Table:
    columns: dict[str, Callable[[Growth], object]] = {
        "process": lambda growth: f"{growth.name} {growth.pid}",
        "watched s": lambda growth: number(growth.span_s, 0),
        "MiB after warm-up": lambda growth: number(growth.first_bytes / _MIB, 1),
        "MiB at the end": lambda growth: number(growth.last_bytes / _MIB, 1),
        "growth %": lambda growth: f"{100 * growth.share:+.1f}",
    }
    long = f"{len(result.growths)} processes that lived long enough, of {result.num_processes}"
    caption = f"Not long enough: {', '.join(result.unjudged)}" if result.unjudged else None
    return table_of(f"Memory of the {long}", columns, result.growths[:MAX_LINES], caption=caption)


def _failures(result: SoakResult) -> Table:
    columns: dict[str, Callable[[Entry], object]] = {
        "ended at s": lambda entry: number(entry.ended_s, 1),
        "verdict": lambda entry: entry.verdict.value,
        "way": lambda entry: entry.way.value,
        "case": lambda entry: entry.case_index,
        "reason": lambda entry: entry.reason,
    }
    title = f"The first of {len(result.ledger.bad)} bad requests"
    return table_of(title, columns, result.ledger.bad[:MAX_LINES], text=columns)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} / {max(known):.1f}" if known else DASH


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
