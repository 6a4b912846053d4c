"""What ``specray models`` lists and removes: known models, and checkpoints in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specray.errors import ConfigError
from specray.models.cache import KeptCheckpoint, ModelCache, size_below
from specray.models.catalogue import KNOWN_MODELS, KnownModel, find_known
from specray.models.progress import Listener
from specray.models.space import format_size

_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A row of the list."""

    name: str
    """Name, or the directory in the cache of a checkpoint whose model is not known by name."""
    download: str
    """Size of what a fetch downloads."""
    kept_size: str
    """Size on this disk."""
    licence: str
    origin: str
    """Where it comes from."""


def list_models(cache: ModelCache) -> list[ListedModel]:
    """Known models, kept or not, then the kept checkpoints of GGUF files."""
    kept = {checkpoint.sha256: checkpoint for checkpoint in cache.checkpoints()}
    rows = [_known_row(known, kept.pop(known.sha256, None), cache) for known in KNOWN_MODELS]
    return (
        rows
        + [
            ListedModel(
                checkpoint.directory.name,
                _NOTHING,
                format_size(checkpoint.size),
                _NOTHING,
                "a GGUF file" if checkpoint.gguf is None else f"the GGUF file {checkpoint.gguf}",
            )
            for checkpoint in kept.values()
        ]
        + [
            ListedModel(
                directory.name,
                _NOTHING,
                format_size(size_below(directory)),
                _NOTHING,
                "another version of specray",
            )
            for directory in cache.unreadable()
        ]
    )


def remove_model(name: str, cache: ModelCache, listener: Listener) -> int:
    """Removes checkpoints of this name or directory, and a known model's GGUF file, whole or not.

    Returns:
        Their bytes.

    Raises:
        ConfigError: nothing of this name is kept, or the cache cannot be written.
    """
    known = find_known(name)
    wanted = name if known is None else known.name
    found = {kept.sha256 for kept in cache.checkpoints() if wanted in (kept.name, kept.directory.name)}
    # The key of its lock ends the name of a directory.
    found |= {path.name.rpartition("-")[2] for path in cache.unreadable() if path.name == wanted}
    if known is not None and (_files_of(known.sha256, cache) or cache.unreadable(known.sha256)):
        found.add(known.sha256)
    if not found:
        names = ", ".join(kept.name for kept in cache.checkpoints()) or "none"
        raise ConfigError(f"model {name!r} is not kept; kept: {names}")
    return sum(_remove(sha256, name, cache, listener) for sha256 in sorted(found))


def _remove(sha256: str, name: str, cache: ModelCache, listener: Listener) -> int:
    num_bytes = 0
    with cache.locked(sha256, listener, name), cache.using():
        if (kept := cache.checkpoint(sha256)) is not None:
            num_bytes += kept.size
            cache.remove_checkpoint(kept)
        for directory in cache.unreadable(sha256):
            num_bytes += size_below(directory)
            cache.remove_directory(directory, sha256)
        for path, size in _files_of(sha256, cache).items():
            num_bytes += size
            path.unlink()
    return num_bytes


def _files_of(sha256: str, cache: ModelCache) -> dict[Path, int]:
    """The GGUF file of a known model, and what is there of one that is being fetched; with their bytes."""
    paths = (cache.gguf(sha256), cache.partial_gguf(sha256))
    return {path: path.stat().st_size for path in paths if path.is_file()}


def _known_row(known: KnownModel, kept: KeptCheckpoint | None, cache: ModelCache) -> ListedModel:
    size = (kept.size if kept is not None else 0) + sum(_files_of(known.sha256, cache).values())
    return ListedModel(
        known.name,
        format_size(known.download_size),
        format_size(size) if size else _NOTHING,
        known.licence if known.terms is None else f"{known.licence}: {known.terms}",
        f"package index: {known.origin}; made from {known.hub_id}"
        + ("" if known.draft is None else f"; drafted for by {known.draft.name}"),
    )
