"""Finds the directory that holds a model's files: a path as it is, or a hub id's snapshot.

A path that exists never touches the network.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specray.engine.model.checkpoint.headers import weight_files
from specray.engine.model.checks.formats import check_adapter
from specray.errors import ConfigError
from specray.gguf.light import WEIGHTS, gguf_weights
from specray.json_files import read_json_file

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a hub id that say what a model is and how its text is read."""


def local_directory(path: str) -> Path | None:
    """The directory that ``path`` names; None: it is a hub id.

    Raises:
        ConfigError: it is neither, or a directory without a model.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            check_adapter(path, directory)
            raise ConfigError(f"model {path!r} is a directory without config.json")
        if gguf_weights(directory) is None and not any(directory.glob("*.safetensors")):
            raise ConfigError(
                f"model {path!r} holds no *.safetensors file and no {WEIGHTS}; other formats are not loaded"
            )
        return directory
    if directory.is_file() and directory.suffix == ".gguf":
        raise ConfigError(
            f"model {path!r} is a GGUF file; allowed: the checkpoint that `specray models fetch` makes of it"
        )
    if directory.exists():
        raise ConfigError(f"model {path!r} is a file; a directory or a hub id is expected")
    if not _HUB_ID.fullmatch(path):
        raise ConfigError(f"model {path!r} does not exist, and is not a hub id such as 'owner/name'")
    return None


def find_description(path: str) -> Path | None:
    """The directory with a model's configuration and tokenizer, downloaded where need be.

    None: the hub does not give them; transformers, asked for them, says why.

    Raises:
        ConfigError: as :func:`local_directory`.
    """
    directory = local_directory(path)
    if directory is not None:
        return directory
    snapshot = _snapshot(path, _DESCRIPTIONS)
    return snapshot if snapshot is not None and (snapshot / "config.json").is_file() else None


def find_weights(path: str, description: Path, entry: str | None = None) -> Path | None:
    """Directory of the weights, downloaded if need be; None: not on the hub. ``entry`` as of the headers."""
    if local_directory(path) is not None:
        return description
    names = [file.name for file in weight_files(description, entry)] or ["model.safetensors"]
    snapshot = _snapshot(path, names, revision=description.name)
    return snapshot if snapshot is not None and all((snapshot / name).is_file() for name in names) else None


def read_config(directory: Path) -> dict[str, Any] | None:
    """What config.json holds; None: it is damaged, or points to another file."""
    try:
        values = read_json_file(directory / "config.json")
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and "configuration_files" not in values else None


def _snapshot(path: str, patterns: Sequence[str], revision: str | None = None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # No network, no such repository, no permission: each raises its own kind.
        logger.info("%s: the hub gives no %s: %s", path, ", ".join(patterns), error)
        return None
