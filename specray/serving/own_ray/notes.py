"""Notes of the services that this user runs on this machine with a Ray of their own: how to reach that Ray.

A note holds the token of the service's Ray, so only its user may read it; it is gone when the service ends.
It lies in the directory of temporary files, or in the user's cache if that one is another user's or full.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from specray.environment import cache_directory, is_private
from specray.errors import ConfigError

logger = logging.getLogger(__name__)


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
    """Keeps a note of this process's service while the block runs; warns where there is no place for one."""
    environment = {name: os.environ[name] for name in AUTH_VARIABLES if name in os.environ}
    note = Note(os.getpid(), port, address, environment)
    problems: list[str] = []
    path = next((path for directory in _directories() if (path := _write(directory, note, problems))), None)
    if path is None:
        logger.warning(
            "there is no place for the note by which `specray reload` finds this service, which needs "
            "RAY_ADDRESS=%s then: %s",
            address,
            "; ".join(problems),
        )
    try:
        yield
    finally:
        if path is not None:
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
    for directory in _directories():
        if _problem(directory) is not None:
            continue
        for path in directory.glob(f"{_host()}-*.json"):
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


def _host() -> str:
    """This machine's name: a home directory may be that of several."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())


def _directories() -> list[Path]:
    places = [Path(tempfile.gettempdir()) / f"specray-{os.getuid()}"]
    with suppress(ConfigError):
        places.append(cache_directory() / "services")
    return places


def _problem(directory: Path) -> str | None:
    """Why a directory is not used; None: only this user may enter it."""
    try:
        if is_private(directory):
            return None
    except OSError as error:
        return f"{directory}: {error.strerror}"
    return f"{directory} must be a directory of your own that nobody else may enter"


def _write(directory: Path, note: Note, problems: list[str]) -> Path | None:
    path = directory / f"{_host()}-{note.pid}.json"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if problem := _problem(directory):
            problems.append(problem)
            return None
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(note), file)
    except OSError as error:
        problems.append(f"{directory}: {error.strerror}")
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    return path
