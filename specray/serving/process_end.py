"""Ends a process that has run Ray with its own exit status, whatever threads Ray has left in it."""

from __future__ import annotations

import atexit
import ctypes
import functools


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
