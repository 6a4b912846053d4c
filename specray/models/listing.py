"""What ``specray models`` lists and removes: known models, and checkpoints in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from specray.errors import ConfigError
from specray.models.cache import KeptCheckpoint, ModelCache
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
    return rows + [
        ListedModel(
            checkpoint.directory.name,
            _NOTHING,
            format_size(checkpoint.size),
            _NOTHING,
            "a GGUF file",
        )
        for checkpoint in kept.values()
    ]


def remove_model(name: str, cache: ModelCache, listener: Listener) -> int:
    """Removes checkpoints of this name or directory, and a known model's GGUF file. Returns their bytes.

    Raises:
        ConfigError: nothing of this name is kept, or the cache cannot be written.
    """
    known = find_known(name)
    wanted = name if known is None else known.name
    found = {kept.sha256 for kept in cache.checkpoints() if wanted in (kept.name, kept.directory.name)}
    if known is not None and cache.gguf(known.sha256).is_file():
        found.add(known.sha256)
    if not found:
        names = ", ".join(kept.name for kept in cache.checkpoints()) or "none"
        raise ConfigError(f"model {name!r} is not kept; kept: {names}")
    return sum(_remove(sha256, name, cache, listener) for sha256 in sorted(found))


def _remove(sha256: str, name: str, cache: ModelCache, listener: Listener) -> int:
    num_bytes = 0
    with cache.locked(sha256, listener, name), cache.using():
        kept, gguf = cache.checkpoint(sha256), cache.gguf(sha256)
        if kept is not None:
            num_bytes += kept.size
            cache.remove_checkpoint(kept)
        if gguf.is_file():
            num_bytes += gguf.stat().st_size
            gguf.unlink()
    return num_bytes


def _known_row(known: KnownModel, kept: KeptCheckpoint | None, cache: ModelCache) -> ListedModel:
    gguf = cache.gguf(known.sha256)
    size = (kept.size if kept is not None else 0) + (gguf.stat().st_size if gguf.is_file() else 0)
    return ListedModel(
        known.name,
        format_size(known.download_size),
        format_size(size) if size else _NOTHING,
        known.licence if known.terms is None else f"{known.licence}: {known.terms}",
        f"package index: {known.origin}; made from {known.hub_id}",
    )
