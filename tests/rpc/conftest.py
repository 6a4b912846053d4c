"""Addresses that no other test uses."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path short enough for a unix socket, which pytest's own directories need not be."""
    directory = Path(tempfile.mkdtemp(prefix="sr-"))
    yield directory / "s"
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def address(socket_path: Path) -> str:
    return f"unix:{socket_path}"
