"""A time limit for chat templates, which are code of whoever made the checkpoint."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

MAX_RENDER_S = 10.0
"""Seconds of one rendering of a chat template, whose sandbox bounds no loops."""
_T = TypeVar("_T")


class _OverdueError(BaseException):
    """Ends the function; no ``except Exception`` within it keeps this one."""


def run_limited(function: Callable[[], _T], limit_s: float) -> _T:
    """Calls a function, and ends it where it takes longer, within one of its next Python instructions.

    Raises:
        TimeoutError: it did not end within ``limit_s`` seconds.
    """
    lock = threading.Lock()
    thread = ctypes.c_ulong(threading.get_ident())
    is_done = False

    def end() -> None:
        with lock:
            if not is_done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_OverdueError))

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    try:
        timer.start()
        try:
            return function()
        finally:
            with lock:
                is_done = True
                # One that was sent and has not arrived yet.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
            timer.cancel()
    except _OverdueError:
        raise TimeoutError(f"did not end within {limit_s:g} s") from None
