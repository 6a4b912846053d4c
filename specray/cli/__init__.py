"""The command line. A command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the ``specray`` program and ends the process with its exit code.

    Args:
        arguments: the command line without the program's name; default: the process's own.
    """
    guardian = None
    if arguments is None and sys.argv[1:2] == ["serve"]:
        # Before anything is loaded, and while there is one thread.
        from specray.cli.ending import guarded

        guardian = guarded()
    from specray.cli.app import run

    raise SystemExit(run(arguments, guardian))
