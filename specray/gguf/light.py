"""Light checkpoints: directories of a model whose weights lie in a GGUF file alone."""

from __future__ import annotations

from pathlib import Path

from specray.errors import ConfigError

WEIGHTS = "model.gguf"
"""File with the weights, with config.json and the tokenizer's files beside it."""


def gguf_weights(directory: Path) -> Path | None:
    """The GGUF file of a light checkpoint; None: it is none, or has safetensors, which go before."""
    file = directory / WEIGHTS
    return file if file.is_file() and not any(directory.glob("*.safetensors")) else None


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
