"""The program, run in this process."""

from __future__ import annotations

import pytest

from specray.cli import main


def run(*arguments: object) -> int:
    """Runs ``specray`` with these arguments; returns the exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return end.value.code
