"""How a process ends in which Ray has run: with its exit status, whatever threads Ray has left in it."""

from __future__ import annotations

import atexit
import ctypes
import functools


@functools.cache
def end_without_destructors() -> None:
    """From now on this process ends without the destructors of C++ libraries.

    Python ends as ever, with its own exit functions and what its files hold; so do C's files. Then the
    process is gone, with its status. Does nothing where the C library has no ``on_exit``, as on macOS.

    Ray 2.60 starts a thread for each ``ray.init`` that exports metrics every ten seconds, and
    ``ray.shutdown`` does not end it. One that finds no collector after that logs so, and the log may be what
    a destructor has just ended: a run of our tests, with seven such threads, passed and then died of SIGSEGV.
    With exports every 0.2 s and destructors that took three seconds, five of six processes used freed memory
    (a script that starts and ends four Rays).
    """
    # Late: exit functions of C run from the last to the first, and destructors are such, registered when a
    # library is loaded or an object is first used.
    atexit.register(_skip_destructors)


def _skip_destructors() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return
    # The status comes as the first argument, which is what _exit takes.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)
