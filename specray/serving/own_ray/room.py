"""Room for Ray's files: without it Ray's first process waits two minutes and then says nothing of a disk."""

from __future__ import annotations

import shutil

from specray.environment import ray_directory
from specray.errors import ConfigError

_MIN_FREE_BYTES = 128_000_000
"""Bytes that logs, sockets and the memory map of a small service take."""


def check_room() -> None:
    """Checks the directory where Ray keeps its sessions.

    Raises:
        ConfigError: it does not exist, or its disk is nearly full.
    """
    directory = ray_directory()
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(f"{directory}, for Ray's files, cannot be used: {error.strerror}") from None
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"{directory}, for Ray's files, has {free / 1e6:.0f} MB free; "
            f"allowed: {_MIN_FREE_BYTES / 1e6:.0f} MB or more, or another directory (TMPDIR)"
        )
