"""How commands show on stderr that a model is fetched and converted: bars on a terminal, else one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from specray.models.progress import Listener

_TOLD_S = 90.0
"""Seconds from which the rest of a work's time is told."""


@contextmanager
def fetch_listener() -> Iterator[Listener]:
    """Yields the listener of a fetch; its bars stand still when the block ends."""
    if not sys.stderr.isatty():
        yield QuietListener()
        return
    bars = BarListener()
    try:
        yield bars
    finally:
        bars.close()


class QuietListener:
    """Names the first piece of work, and no other."""

    def __init__(self) -> None:
        self._is_said = False

    def notice(self, line: str) -> None:
        print(f"specray: {line}", file=sys.stderr, flush=True)

    def progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        if not self._is_said:
            self._is_said = True
            self.notice(what)


class BarListener:
    """A bar for each piece of work; nothing is drawn, nor imported, before there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._what: str | None = None

    def notice(self, line: str) -> None:
        if self._bars is None:
            print(f"specray: {line}", file=sys.stderr, flush=True)
        else:
            self._bars.console.print(f"specray: {line}", markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        self._bars = self._bars or _new_bars(self._clock)
        if what != self._what or self._task is None:
            self._finish()
            self._what = what
            self._task = self._bars.add_task(f"specray: {what}", total=total, size="", left="")
        size = "" if total is None else f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
        left_s = self._bars.tasks[self._bars.task_ids.index(self._task)].time_remaining or 0.0
        left = f"{left_s / 60:.0f} min left" if left_s >= _TOLD_S else ""
        self._bars.update(self._task, completed=done, total=total, size=size, left=left)

    def close(self) -> None:
        if self._bars is not None:
            self._finish()
            self._bars.stop()

    def _finish(self) -> None:
        """Stops the clock of the work before, and the motion of a bar without an end."""
        if self._bars is not None and self._task is not None:
            task = self._bars.tasks[self._bars.task_ids.index(self._task)]
            if task.total is None:
                self._bars.update(self._task, completed=1, total=1)
            self._bars.stop_task(self._task)


def _new_bars(clock: Callable[[], float]) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    bars = Progress(*columns, console=Console(stderr=True), get_time=clock)
    bars.start()
    return bars
