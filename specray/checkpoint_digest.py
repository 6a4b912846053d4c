"""Identity of models and adapters by the content of their files, wherever and by what names these lie."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from specray.errors import ConfigError

WEIGHT_FILES: Final = (".safetensors", ".gguf")
"""Ends of the names of files of weights."""
_DIGEST_BYTES: Final = 32
_HEAD_BYTES: Final = 16 * 2**20
"""Bytes at a file's start that are read whole: the header with names, types and shapes of all tensors."""
_NUM_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


def file_digest(file: Path) -> bytes:
    """The digest of a file of weights: its size, its header, and samples of its data.

    Gigabytes are not read: of two files that differ in a few numbers alone, as no training makes them, the
    digests may be equal.

    Raises:
        OSError: it cannot be read.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"specray weights1")
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(stream.read(_HEAD_BYTES))
        rest = size - _HEAD_BYTES
        for number in range(_NUM_SAMPLES if rest > 0 else 0):
            start = _HEAD_BYTES + max(0, rest - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1)
            digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, start))
    return digest.digest()


def adapter_digest(directory: Path) -> bytes:
    """The digest of an adapter, 32 bytes: of all bytes of its configuration and its tensors.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    contents = []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        try:
            contents.append((directory / name).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"adapter {str(directory)!r}: {name} cannot be read: {error.strerror}"
            ) from None
    return digest_of_adapter(contents)


def digest_of_adapter(contents: Iterable[bytes]) -> bytes:
    """The same, of the bytes of both files."""
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"specray adapter1")
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


def checkpoint_digest(
    path: str, directory: Path | None, *, adapter: str | None = None, settings: Iterable[str] = ()
) -> str:
    """The digest of a model as it is computed, in hexadecimal: config.json, weights, adapter, settings.

    Args:
        path: name of the model, which stands for files that are not in ``directory``.
        directory: of the files; None: only a library knows where they are.
        adapter: directory of an adapter that is merged into the weights.
        settings: further texts on which outputs depend, such as formats of numbers.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"specray model 1")
    parts = [text.encode() for text in settings]
    try:
        parts += _content(path, directory)
    except OSError as error:
        raise ConfigError(f"model {path!r} cannot be read: {error.filename}: {error.strerror}") from None
    if adapter is not None:
        parts.append(adapter_digest(Path(adapter)))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _content(path: str, directory: Path | None) -> list[bytes]:
    """The configuration, and the digest of each file of weights; names of files do not count."""
    if directory is None:
        return [path.encode()]
    files = sorted(file for file in directory.iterdir() if file.suffix in WEIGHT_FILES and file.is_file())
    return [
        (directory / "config.json").read_bytes(),
        *(map(file_digest, files) if files else [path.encode()]),
    ]
