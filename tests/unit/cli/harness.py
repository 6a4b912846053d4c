"""The program, run in this process."""

from __future__ import annotations

import pytest

from specray.cli import main


def run(*arguments: str) -> int:
    """Runs ``specray`` with these arguments; returns the exit code."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code
