"""Child processes of this process, for whoever has to end what a failed start of Ray has left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

END_S = 5.0
_POLL_S = 0.1


def children() -> set[int]:
    """Returns the children of this process; none where the system does not tell."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in lists for pid in path.read_text().split()}


def end_children(pids: Collection[int]) -> None:
    """Ends children of this process, after some time to clean up."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + patience_s
        while pids and time.monotonic() < deadline_s:
            pids = {pid for pid in pids if not _is_reaped(pid)}
            time.sleep(_POLL_S)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
