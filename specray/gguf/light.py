"""Light checkpoints: directories of a model whose weights lie in a GGUF file alone."""

from __future__ import annotations

import json
from pathlib import Path

from specray.errors import ConfigError

WEIGHTS = "model.gguf"
"""File with the weights, or link to it, with config.json and the tokenizer's files beside it."""
RECORD = "specray.json"
"""Name of the file that says what a kept checkpoint is."""


def gguf_weights(directory: Path) -> Path | None:
    """The GGUF file of a light checkpoint; None: it is none, or has safetensors, which go before.

    Raises:
        ConfigError: it is a link to a file that is gone, or that was changed after the checkpoint was made.
    """
    file = directory / WEIGHTS
    if any(directory.glob("*.safetensors")):
        return None
    if file.is_symlink() and (problem := _problem_of_link(file)) is not None:
        raise ConfigError(
            f"{file} leads to {file.readlink()}, which {problem}; allowed: the file as it was, or what "
            "`specray models fetch` makes of it now"
        )
    return file if file.is_file() else None


def _problem_of_link(link: Path) -> str | None:
    try:
        status = link.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror}): it was moved or removed"
    linked = linked_file(link.parent)
    if linked is not None and linked != (status.st_size, status.st_mtime_ns):
        return "was changed after this checkpoint was made"
    return None


def linked_file(directory: Path) -> tuple[int, int] | None:
    """Bytes and time of change (ns) of the file that a kept checkpoint links to; None: no record of it."""
    try:
        size, mtime_ns = json.loads((directory / RECORD).read_text("utf-8"))["linked"]
        return int(size), int(mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_has_safetensors(path: str, purpose: str) -> None:
    """Raises ConfigError where a model is a light checkpoint.

    Args:
        path: the model as the user wrote it; a hub id is none.
        purpose: who needs more, for the message.
    """
    file = gguf_weights(Path(path).expanduser())
    if file is not None:
        raise ConfigError(
            f"model {path!r} has its weights in {WEIGHTS}, which {purpose} does not read; allowed: what "
            f"`specray models convert {file} DIRECTORY` writes"
        )
