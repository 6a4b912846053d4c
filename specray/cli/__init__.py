"""The command line. A command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the ``specray`` program and ends the process with its exit code.

    Args:
        arguments: the command line without the program's name; default: the process's own.
    """
    from specray.cli.app import run

    raise SystemExit(run(arguments))
