"""Ends what Ray leaves in this process and below it: children of a failed start, and threads at the end."""

from __future__ import annotations

import atexit
import ctypes
import functools
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


@functools.cache
def end_without_destructors() -> None:
    """Ends this process, when its time comes, without the destructors of C++ libraries.

    Python ends as usual, with its exit functions and flushed files; so do C's files. Does nothing where the C
    library has no ``on_exit``, as on macOS.

    Ray 2.60 starts a thread for each ``ray.init`` that exports metrics every ten seconds, and
    ``ray.shutdown`` does not end it. A thread that finds no collector then logs that, perhaps with a logger
    that a destructor has just destroyed: a run of our tests, with seven such threads, passed and then died of
    SIGSEGV.
    """
    # Registered late: exit functions of C run from the last to the first, and destructors are among them,
    # registered when a library is loaded or an object is first used.
    atexit.register(_skip_destructors)


def _skip_destructors() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return
    # The first argument is the status, which is what _exit takes.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)
