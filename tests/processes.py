"""Whether processes of this machine run, for tests that start some."""

from __future__ import annotations

import time
from pathlib import Path

DEADLINE_S = 30.0


def is_running(pid: int) -> bool:
    """False also for a process that has ended and that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(*pids: int) -> bool:
    """Whether all have ended within the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while any(map(is_running, pids)) and time.monotonic() < end_s:
        time.sleep(0.02)
    return not any(map(is_running, pids))
