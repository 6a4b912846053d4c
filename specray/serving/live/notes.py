"""Notes of the services that this user runs on this machine with a Ray of their own: how to reach that Ray.

A note holds the token of the service's Ray, so only its user may read it; it is gone when the service ends.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Note:
    """How to reach the Ray of one service."""

    pid: int
    """Process of ``specray serve``."""
    port: int
    """HTTP port of the service."""
    address: str
    """Address of its Ray: ``host:port``."""
    environment: dict[str, str]
    """Variables that Ray's authentication needs."""


AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables by which Ray's processes know each other."""


@contextmanager
def noted(port: int, address: str) -> Iterator[None]:
    """Keeps a note of a service of this process while the block runs.

    Raises:
        ConfigError: the directory of notes belongs to somebody else.
    """
    environment = {name: os.environ[name] for name in AUTH_VARIABLES if name in os.environ}
    note = Note(os.getpid(), port, address, environment)
    path = _directory() / f"{note.pid}.json"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(note), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_note(port: int | None) -> Note:
    """The note of the service on an HTTP port; None: of the only one.

    Raises:
        ConfigError: there is no such service, or several.
    """
    notes = sorted(_notes(), key=lambda note: note.port)
    ports = ", ".join(str(note.port) for note in notes) or "none"
    found = [note for note in notes if port in (None, note.port)]
    if not found:
        where = "" if port is None else f" on HTTP port {port}"
        raise ConfigError(
            f"no service of yours runs{where} on this machine; ports of those that run: {ports}; "
            "set RAY_ADDRESS for one in a cluster"
        )
    if len(found) > 1:
        raise ConfigError(f"several services run on this machine; name one with --port, of {ports}")
    return found[0]


def _notes() -> Iterator[Note]:
    for path in _directory().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            note = Note(**json.loads(path.read_text()))
            if _is_running(note.pid):
                yield note
            else:
                # Its process was killed.
                path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _directory() -> Path:
    """The directory of notes, which only its owner may enter. Others may have made one of its name."""
    path = Path(tempfile.gettempdir()) / f"specray-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(f"{path} must be a directory of your own that nobody else may enter")
    return path
