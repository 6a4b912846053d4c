"""Measures what an idle service costs: processor time and wake-ups of each process, read off /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specray.bench.core.report import table_of
from specray.bench.soak.memory import anonymous_bytes, process_name
from specray.bench.testbed.tree import descendants

if TYPE_CHECKING:
    from rich.table import Table

_WAKE = "voluntary_ctxt_switches:"


@dataclass(frozen=True, slots=True)
class Used:
    """What one process has used since its start."""

    seconds: float
    """Processor seconds, of user and system."""
    num_wakes: int
    """Times that a thread of it went to sleep, of those that live."""


@dataclass(frozen=True, slots=True)
class IdleRow:
    process: str
    percent: float
    """Share of one core in percent."""
    wakes_per_s: float
    mib: float | None
    """Anonymous memory in MiB; None: of several processes together, or not known."""


def measure_idle(
    pid: int, *, duration_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[IdleRow, ...]:
    """Watches a process and all below it; those that use most come first.

    A process that starts or ends meanwhile is not counted.

    Args:
        duration_s: length of the watch in seconds.
    """
    before, began_s = _used(pid), time.monotonic()
    sleep(duration_s)
    after, seconds = _used(pid), time.monotonic() - began_s
    rows = [
        IdleRow(
            process_name(one, {}),
            100 * (used.seconds - before[one].seconds) / seconds,
            max(0, used.num_wakes - before[one].num_wakes) / seconds,
            None if (held := anonymous_bytes(one)) is None else held / 2**20,
        )
        for one, used in after.items()
        if one in before
    ]
    return tuple(sorted(rows, key=lambda row: -row.percent))


def whole(rows: tuple[IdleRow, ...]) -> IdleRow:
    """All processes together."""
    return IdleRow(
        "all processes", sum(row.percent for row in rows), sum(row.wakes_per_s for row in rows), None
    )


def idle_table(rows: tuple[IdleRow, ...], *, duration_s: float) -> Table:
    return table_of(
        f"An idle service, {duration_s:g} s",
        {
            "process": lambda row: row.process,
            "% of one core": lambda row: row.percent,
            "wakes/s": lambda row: row.wakes_per_s,
            "MiB": lambda row: row.mib,
        },
        [*rows, whole(rows)],
    )


def _used(pid: int) -> Mapping[int, Used]:
    found = {one: used_by(one) for one in (pid, *descendants(pid))}
    return {one: used for one, used in found.items() if used is not None}


def used_by(pid: int) -> Used | None:
    """Returns what a process has used; None: it has ended."""
    directory = Path("/proc") / str(pid)
    try:
        # The name, in parentheses, may contain anything.
        fields = (directory / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        wakes = [_wakes(path) for path in (directory / "task").iterdir()]
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return Used((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), sum(wakes))


def _wakes(thread: Path) -> int:
    try:
        lines = (thread / "status").read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(_WAKE)), 0)
