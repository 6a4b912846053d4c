"""Checkpoints of known models and of GGUF files: from the cache, or fetched and made there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from specray.gguf.header import read_header
from specray.models.cache import KeptCheckpoint, ModelCache, file_sha256
from specray.models.catalogue import KnownModel
from specray.models.conversion import check_convertible, convert, make_checkpoint
from specray.models.parts import fetch_files
from specray.models.progress import Listener

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
        return _make(gguf, known.name, known.sha256, cache, listener)


def fetch_together(models: Sequence[KnownModel], cache: ModelCache, listener: Listener) -> None:
    """Fetches the GGUF files of known models at once, where several are missing.

    What is broken, and a single file, is left to :func:`known_checkpoint`.

    Raises:
        ConfigError: as there.
    """

    def missing() -> list[KnownModel]:
        kept = {checkpoint.sha256 for checkpoint in cache.checkpoints()}
        return [
            known
            for known in dict.fromkeys(models)
            if known.sha256 not in kept and not cache.gguf(known.sha256).is_file()
        ]

    if len(wanted := missing()) < 2:
        return
    with ExitStack() as stack, cache.using():
        # In one order, so that no two processes wait for each other.
        for known in sorted(wanted, key=lambda known: known.sha256):
            stack.enter_context(cache.locked(known.sha256, listener, known.name))
        # Another process may have fetched them in the meantime.
        if found := missing():
            fetch_files(found, cache, listener)


def file_checkpoint(path: Path, cache: ModelCache, listener: Listener) -> KeptCheckpoint:
    """The verified checkpoint of a GGUF file, made where it is not kept yet.

    Raises:
        ConfigError: the file is damaged or of a kind that cannot be converted; one sentence.
    """
    if (kept := cache.checkpoint_of(path)) is not None:
        return kept
    check_convertible(path, read_header(path))
    sha256 = _watched_sha256(path, listener)
    kept = cache.checkpoint(sha256)
    if kept is not None and kept.problem() is None:
        return kept
    with cache.locked(sha256, listener, path.name), cache.using():
        if (kept := _sound(cache, sha256, listener)) is not None:
            return kept
        return _make(path, path.stem, sha256, cache, listener)


def known_file(known: KnownModel, cache: ModelCache, listener: Listener) -> Path:
    """The verified GGUF file of a known model. Raises ConfigError as :func:`known_checkpoint`."""
    with cache.locked(known.sha256, listener, known.name), cache.using():
        return _known_gguf(known, cache, listener)


def plain_directory(kept: KeptCheckpoint, cache: ModelCache, listener: Listener) -> Path:
    """A kept model as a bfloat16 checkpoint in safetensors, which training reads; made once.

    Raises:
        ConfigError: as :func:`specray.models.conversion.convert`.
    """
    if (gguf := kept.gguf) is None:
        return kept.directory
    # In the light one's directory, so that it goes where that goes.
    destination = kept.directory / "bfloat16"
    if destination.is_dir():
        return destination
    with cache.locked(kept.sha256, listener, kept.name), cache.using():
        if not destination.is_dir():
            with cache.work_directory(kept.sha256) as work:
                written = work / "checkpoint"
                convert(gguf, written, work / "converter", listener, f"converting {kept.name}")
                written.rename(destination)
    return destination


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


def _make(gguf: Path, name: str, sha256: str, cache: ModelCache, listener: Listener) -> KeptCheckpoint:
    for older in cache.unreadable(sha256):
        listener.notice(f"{older}, which another version of specray kept, is made again")
        cache.remove_directory(older, sha256)
    with cache.work_directory(sha256) as work:
        written = work / "checkpoint"
        make_checkpoint(gguf, written, work / "converter", listener, name)
        return cache.keep_checkpoint(written, name, sha256)


def _known_gguf(known: KnownModel, cache: ModelCache, listener: Listener) -> Path:
    path = cache.gguf(known.sha256)
    if path.is_file():
        if file_sha256(path) == known.sha256:
            return path
        listener.notice(f"the kept file {path} is broken; its broken parts are fetched again")
        cache.reopen_gguf(known.sha256)
    fetch_files([known], cache, listener)
    return path
