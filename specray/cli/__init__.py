"""The command line. Every command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The ``specray`` program; ends the process with its exit code.

    Args:
        arguments: instead of the process's own.
    """
    from specray.cli.app import run

    raise SystemExit(run(arguments))
