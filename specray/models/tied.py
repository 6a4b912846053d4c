"""Runs a module as ``python -m`` does, in a process that ends with the one that started it (on Linux)."""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the module that the first argument names, with the others as its own."""
    if sys.platform == "linux":
        # A process that is killed can end no child; this one would go on downloading, or writing gigabytes.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
