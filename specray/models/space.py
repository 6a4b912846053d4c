"""Room on a disk, asked for before it is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

from specray.errors import ConfigError

LIGHT_BYTES = 50_000_000
"""Bytes left for a tokenizer and the small files of a checkpoint."""


def check_space(directory: Path, num_bytes: int, what: str) -> None:
    """Raises ConfigError where a directory's disk has less free space than ``what`` takes."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ConfigError(
            f"{what} needs {format_size(num_bytes)} in {directory}, where {format_size(free)} are free"
        )


def format_size(num_bytes: int) -> str:
    """A size for people: ``98 MB``, ``1.2 GB``."""
    if num_bytes < 999.5e6:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e9:.1f} GB"
