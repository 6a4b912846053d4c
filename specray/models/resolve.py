"""What a user means by a model: a known name, a GGUF file, or something that engines load as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specray.errors import ConfigError
from specray.models.cache import KeptCheckpoint, ModelCache
from specray.models.catalogue import KnownModel, find_known
from specray.models.fetch import file_checkpoint, known_checkpoint, known_file
from specray.models.progress import Listener


@dataclass(frozen=True, slots=True)
class UserFile:
    """A GGUF file of the user's."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem


Source = KnownModel | UserFile
"""A model that becomes a checkpoint in the cache."""


def find_source(text: str) -> Source | None:
    """What becomes a checkpoint first; None: a checkpoint, a hub id or a name that means something else.

    A path that exists goes before a known name.

    Raises:
        ConfigError: a directory has several GGUF files and no safetensors.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return _gguf_in(path)
    if path.is_file() or path.suffix == ".gguf":
        return UserFile(path.absolute()) if path.suffix == ".gguf" else None
    return find_known(text)


def source_checkpoint(source: Source, cache: ModelCache, listener: Listener) -> KeptCheckpoint:
    """The verified checkpoint of a source, fetched and converted where need be. Raises ConfigError."""
    if isinstance(source, KnownModel):
        return known_checkpoint(source, cache, listener)
    return file_checkpoint(source.path, cache, listener)


def source_file(source: Source, cache: ModelCache, listener: Listener) -> Path:
    """The GGUF file of a source, fetched and verified where it is a known model's. Raises ConfigError."""
    return known_file(source, cache, listener) if isinstance(source, KnownModel) else source.path


def _gguf_in(directory: Path) -> UserFile | None:
    """The GGUF file of a directory without safetensors."""
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"model {str(directory)!r} holds several GGUF files; allowed: one of {names}")
    return UserFile(found[0].absolute())
