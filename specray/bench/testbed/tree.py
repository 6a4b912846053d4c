"""Finds every descendant of this process by parentage, even if those in between have died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
END_TIMEOUT_S = 10.0


@contextmanager
def adopting() -> Iterator[None]:
    """Adopts orphans among this process's descendants while the block runs.

    So none of them can get away: :func:`descendants` sees all. Children that were started in the block and
    are left at its end are killed, with all of theirs.
    """
    before = set(descendants(os.getpid()))
    adopt_orphans(True)
    try:
        yield
    finally:
        end_all(before)
        adopt_orphans(False)


def adopt_orphans(is_wanted: bool) -> None:
    """Makes orphans among this process's descendants its children, or no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def end_all(spared: set[int]) -> None:
    """Kills every descendant of this process except those spared; returns when they have ended."""
    end_s = time.monotonic() + END_TIMEOUT_S
    while (left := set(descendants(os.getpid())) - spared) and time.monotonic() < end_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(left)
        time.sleep(0.02)


def reap(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def reap_orphans() -> None:
    """Collects dead processes that became this one's children when their parents died.

    A dead process that nobody collects keeps its id, and whoever waits for its end waits for ever. Children
    that this process started itself are left alone: they lead a session of their own.
    """
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (found := _stat(path)) is not None:
            pid = int(path.name)
            if found.parent == os.getpid() and found.is_dead and found.session != pid:
                reap({pid})


def descendants(pid: int) -> tuple[int, ...]:
    """Returns the ids of all living processes below ``pid``, without ``pid``."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (found := _stat(path)) is not None:
            children.setdefault(found.parent, []).append(int(path.name))
    below: list[int] = []
    waiting = [pid]
    while waiting:
        next_ones = children.get(waiting.pop(), [])
        below += next_ones
        waiting += next_ones
    return tuple(below)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    session: int
    is_dead: bool


def _stat(path: Path) -> _Stat | None:
    try:
        text = (path / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may contain anything.
    state, parent, _, session = text.rpartition(")")[2].split()[:4]
    return _Stat(int(parent), int(session), state == "Z")
