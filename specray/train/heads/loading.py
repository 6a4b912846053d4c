"""Loads models of transformers for training, and says whose checkpoint cannot be read."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specray.errors import ConfigError
from specray.train.draft.markers import TurnMarkers, turn_markers

_log = logging.getLogger(__name__)


def loaded(path: str, dtype: torch.dtype, *, role: str) -> tuple[Any, Any]:
    """A model and its tokenizer.

    Args:
        path: checkpoint directory or hub id.
        role: ``target`` or ``draft``, for errors.

    Raises:
        ConfigError: transformers cannot load it, or its head has a vocabulary of its own.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{role} {path!r} cannot be loaded by transformers: {reason}") from error
    if (trimmed := getattr(model.config, "draft_vocab_size", None)) is not None:
        raise ConfigError(f"{role} {path!r} has a draft_vocab_size, {trimmed}; allowed: a whole vocabulary")
    return model, tokenizer


def markers_of(tokenizer: Any) -> TurnMarkers | None:
    """What stands around turns; None: there is nothing, and all is written as plain text."""
    try:
        return turn_markers(tokenizer)
    except ConfigError as error:
        _log.warning("%s: it writes no conversations", error)
        return None
