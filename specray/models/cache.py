"""The user's cache of models: checkpoints and GGUF files, each complete and verified or not there at all.

A directory of it::

    <name>-<key>/           a checkpoint, with the sizes and checksums of its files in specray.json; most are
                            light: model.gguf is a link to the GGUF file
    gguf/<checksum>.gguf    the file of a known model
    locks/<key>             held by the process that makes or removes either
    partial/<key>-<random>/ what that process has not finished; left over, the next holder removes it
    partial/<key>.gguf      such a file in parts; left over, the next holder fetches those that are missing

The key is the beginning of the GGUF file's SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specray.environment import cache_directory
from specray.errors import ConfigError
from specray.gguf.light import RECORD, WEIGHTS, linked_file
from specray.models.progress import Listener

_FORMAT = 4
"""1: checkpoints of GGUF files with one end token, whatever the file says. 2: with keys passed over. 3: all
converted, with a tokenizer of transformers."""
_KEY_CHARS = 12
_LOCK_DEADLINE_S = 3600.0
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint in the cache."""

    directory: Path
    name: str
    sha256: str
    """SHA-256 of the GGUF file from which it was made."""
    files: dict[str, tuple[int, str]]
    """Bytes and SHA-256 of each file, by name."""
    linked: tuple[int, int] | None = None
    """Bytes of a light checkpoint's GGUF file and its last change in ns; None: it was converted."""

    @property
    def gguf(self) -> Path | None:
        """The GGUF file of a light checkpoint; None: it has weights of its own."""
        return None if self.linked is None else (self.directory / WEIGHTS).readlink()

    @property
    def size(self) -> int:
        """Bytes of its files, and of what was made of it and lies beside them; not of the GGUF file."""
        return sum(size for size, _ in self.files.values()) + size_below(self.directory, "*/**/*")

    def problem(self) -> str | None:
        """What is wrong with the files on disk; None: they are what was written.

        A GGUF file is the same as long as its size and the time of its last change are.
        """
        if self.linked is not None:
            try:
                status = (self.directory / WEIGHTS).stat()
            except OSError as error:
                return f"its GGUF file cannot be read: {error.strerror}"
            if (status.st_size, status.st_mtime_ns) != self.linked:
                return "its GGUF file was changed"
        for name, (size, digest) in self.files.items():
            path = self.directory / name
            try:
                actual = path.stat().st_size
                if actual != size:
                    return f"{name} has {actual} bytes instead of {size}"
                if file_sha256(path) != digest:
                    return f"{name} has another checksum"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
        return None


class ModelCache:
    """Checkpoints and GGUF files on disk, by the checksum of the GGUF file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def checkpoints(self) -> list[KeptCheckpoint]:
        """All kept checkpoints, by name, not verified."""
        records = sorted(self.root.glob(f"*/{RECORD}"))
        return [kept for record in records if (kept := _read_record(record)) is not None]

    def checkpoint_of(self, gguf: Path) -> KeptCheckpoint | None:
        """The sound light checkpoint of a file that lies where it lay, and was not changed since."""
        found = (kept for kept in self.checkpoints() if kept.gguf == gguf)
        return next((kept for kept in found if kept.problem() is None), None)

    def unreadable(self, sha256: str = "") -> list[Path]:
        """Directories of checkpoints that are damaged or of another version of specray.

        Args:
            sha256: of the GGUF file from which they were made; empty: of any.
        """
        records = sorted(self.root.glob(f"*{sha256[:_KEY_CHARS]}/{RECORD}"))
        return [record.parent for record in records if _read_record(record) is None]

    def checkpoint(self, sha256: str) -> KeptCheckpoint | None:
        """The checkpoint that was made from the GGUF file of this checksum, not verified."""
        return next((kept for kept in self.checkpoints() if kept.sha256 == sha256), None)

    def gguf(self, sha256: str) -> Path:
        """Path of a known model's GGUF file, kept or not."""
        return self.root / "gguf" / f"{sha256}.gguf"

    def partial_gguf(self, sha256: str) -> Path:
        """Path of a known model's GGUF file while parts of it are missing, there or not."""
        return self.root / "partial" / f"{sha256[:_KEY_CHARS]}.gguf"

    @contextmanager
    def locked(
        self, sha256: str, listener: Listener, what: str, deadline_s: float = _LOCK_DEADLINE_S
    ) -> Iterator[None]:
        """Keeps other processes away from one model while the block runs; the system frees a dead one's lock.

        Raises:
            ConfigError: another process has it until the deadline, or the cache cannot be written.
        """
        path = self.root / "locks" / sha256[:_KEY_CHARS]
        with self.using():
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                listener.notice(f"waiting for another process that fetches {what}")
                try:
                    lock.acquire(timeout=deadline_s)
                except Timeout:
                    raise ConfigError(
                        f"another process has been fetching {what} for {deadline_s:g} s; its lock is {path}"
                    ) from None
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def work_directory(self, sha256: str) -> Iterator[Path]:
        """An empty directory for unfinished files, removed at the end; for the holder of the model's lock."""
        partial, key = self.root / "partial", sha256[:_KEY_CHARS]
        with self.using():
            partial.mkdir(parents=True, exist_ok=True)
            for left_over in partial.glob(f"{key}-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            path = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=partial))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def keep_checkpoint(self, written: Path, name: str, sha256: str) -> KeptCheckpoint:
        """Moves a complete checkpoint to its place; for the holder of the model's lock."""
        files = {
            path.name: (path.stat().st_size, file_sha256(path))
            for path in sorted(written.iterdir())
            if path.is_file() and not path.is_symlink()
        }
        linked = None
        if (link := written / WEIGHTS).is_symlink():
            status = link.stat()
            linked = status.st_size, status.st_mtime_ns
        record = {"format": _FORMAT, "name": name, "gguf_sha256": sha256, "files": files, "linked": linked}
        (written / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        destination = self.root / f"{_safe(name)}-{sha256[:_KEY_CHARS]}"
        shutil.rmtree(destination, ignore_errors=True)
        written.rename(destination)
        return KeptCheckpoint(destination, name, sha256, files, linked)

    def keep_gguf(self, written: Path, sha256: str) -> Path:
        """Moves a complete GGUF file to its place; for the holder of the model's lock."""
        destination = self.gguf(sha256)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with written.open("rb") as file:
            # A file that has its name is whole, also after a loss of power.
            os.fsync(file.fileno())
        written.replace(destination)
        return destination

    def reopen_gguf(self, sha256: str) -> None:
        """Moves a broken GGUF file to where its parts are completed; for the holder of the model's lock."""
        destination = self.partial_gguf(sha256)
        destination.parent.mkdir(parents=True, exist_ok=True)
        self.gguf(sha256).replace(destination)

    def remove_checkpoint(self, kept: KeptCheckpoint) -> None:
        """Removes a checkpoint, out of the others' sight first; for the holder of the model's lock."""
        self.remove_directory(kept.directory, kept.sha256)

    def remove_directory(self, directory: Path, key: str) -> None:
        """Removes what :meth:`unreadable` lists likewise; ``key``: what its lock is for."""
        with self.work_directory(key) as work:
            directory.rename(work / "removed")

    @contextmanager
    def using(self) -> Iterator[None]:
        """Turns what the disk refuses into one ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"the cache {self.root} cannot be used: {error.strerror or error}") from None


def size_below(directory: Path, pattern: str = "**/*") -> int:
    """Bytes of the files in a directory that are no links."""
    return sum(
        path.lstat().st_size for path in directory.glob(pattern) if path.is_file() and not path.is_symlink()
    )


def user_cache() -> ModelCache:
    """The cache of this user. Raises ConfigError without a home directory."""
    return ModelCache(cache_directory() / "models")


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, in hexadecimal; ``on_bytes`` receives the bytes read so far."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            on_bytes(num_bytes)
    return digest.hexdigest()


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-") or "model"


def _read_record(path: Path) -> KeptCheckpoint | None:
    """What a checkpoint's record says; None: it is damaged, or of another version of specray."""
    try:
        values: Any = json.loads(path.read_text("utf-8"))
        if values["format"] != _FORMAT:
            return None
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in values["files"].items()}
        if not files or any(Path(name).name != name for name in files):
            return None
        name, sha256 = str(values["name"]), str(values["gguf_sha256"])
        return KeptCheckpoint(path.parent, name, sha256, files, linked_file(path.parent))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
