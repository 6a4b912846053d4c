"""Tests of the end of a process in which Ray has run: it exits with its own status."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 60.0
# The destructor of a library, as the C library sees it: a function registered when it is loaded.
ENDING = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
atexit.register(print, "an exit function of Python")
if "skip" in sys.argv:
    from specray.serving.own_ray.ends import end_without_destructors
    end_without_destructors()
    end_without_destructors()
    # A library that is loaded later.
    libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
print("what Python holds back")
libc.fopen.restype = ctypes.c_void_p
libc.fputs(b"what C holds back", ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w")))
sys.exit(7)
"""


def end(*args: str) -> tuple[int, list[str]]:
    """Returns the exit status, and the lines of its standard output."""
    command = [sys.executable, "-c", ENDING, *args]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False)
    return ended.returncode, sorted(ended.stdout.splitlines())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="this C library has no on_exit")
def test_a_destructor_that_would_crash_does_not_run_and_nothing_that_was_written_is_lost(
    tmp_path: Path,
) -> None:
    written = tmp_path / "written"
    assert end(str(written), "skip") == (7, ["an exit function of Python", "what Python holds back"])
    assert written.read_text() == "what C holds back"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__cxa_atexit"), reason="of another kind of C library")
def test_the_destructor_of_this_test_crashes(tmp_path: Path) -> None:
    assert end(str(tmp_path / "written"))[0] == -signal.SIGABRT
