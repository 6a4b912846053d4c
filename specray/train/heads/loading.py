"""Loads models of transformers for training, and says whose checkpoint cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from specray.errors import ConfigError
from specray.gguf.light import check_has_safetensors
from specray.train.draft.markers import TurnMarkers, turn_markers

_log = logging.getLogger(__name__)

OFFSETS = "d2t"
"""Name of the tensor of a trimmed head: token id minus row, for each row."""
_HEAD = "lm_head.weight"


Adapt = Callable[[Any], None]
"""Changes a model's weights, as an adapter does that is merged into them."""


def loaded(path: str, dtype: torch.dtype, *, role: str, adapt: Adapt | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer.

    Args:
        path: checkpoint directory or hub id.
        role: ``target`` or ``draft``, for errors.
        adapt: what is merged into its weights; None: nothing.

    Raises:
        ConfigError: transformers cannot load it, or its head has a vocabulary of its own.
    """
    check_has_safetensors(path, "training")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise _refused(role, path, error) from error
    if (trimmed := getattr(model.config, "draft_vocab_size", None)) is not None:
        raise ConfigError(f"{role} {path!r} has a draft_vocab_size, {trimmed}; allowed: a whole vocabulary")
    if adapt is not None:
        adapt(model)
    return model, tokenizer


def loaded_draft(path: str, dtype: torch.dtype) -> tuple[Any, Any, torch.Tensor | None]:
    """A draft and its tokenizer, and the token ids of its head's rows, ascending; None: it has all of them.

    A head with ``draft_vocab_size`` rows is what ``specray train draft`` writes; the library reads no such
    checkpoint.

    Raises:
        ConfigError: it cannot be loaded, or its tensors do not fit its configuration.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise _refused("draft", path, error) from error
    if (num_ids := getattr(config, "draft_vocab_size", None)) is None:
        return (*loaded(path, dtype, role="draft"), None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tensors = load_file(str(cached_file(path, "model.safetensors")))
        untyped: Any = AutoModelForCausalLM
        model = untyped.from_config(config, dtype=dtype).eval()
        ids, rows = _head_ids(path, tensors, num_ids, config.vocab_size)
        model.lm_head = nn.Linear(config.hidden_size, num_ids, bias=False, dtype=dtype)
        tensors[_HEAD] = tensors[_HEAD][rows]
        found = model.load_state_dict(tensors, strict=False)
        if others := [*found.missing_keys, *found.unexpected_keys]:
            raise ValueError(f"{others[0]} is missing, or has no place in it")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _refused("draft", path, error) from error
    return model, tokenizer, ids


def _head_ids(
    path: str, tensors: dict[str, torch.Tensor], num_ids: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the ids from the tensors: in ascending order, and the row of each in the head."""
    offsets = tensors.pop(OFFSETS, None)
    # Name of the tensor that marks ids with a row; it is not needed.
    tensors.pop("t2d", None)
    if offsets is None or _HEAD not in tensors or not len(offsets) == len(tensors[_HEAD]) == num_ids:
        raise ConfigError(
            f"draft {path!r} has draft_vocab_size {num_ids}; allowed: as many rows of {_HEAD} and numbers of "
            f"{OFFSETS}"
        )
    ids, rows = (offsets.long() + torch.arange(num_ids)).sort()
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool(ids.diff().gt(0).all()):
        raise ConfigError(
            f"draft {path!r}: {OFFSETS} holds ids from {int(ids[0])} to {int(ids[-1])}; allowed: different "
            f"ones of 0..{vocab_size - 1}"
        )
    return ids, rows


def markers_of(tokenizer: Any) -> TurnMarkers | None:
    """What stands around turns; None: there is nothing, and all is written as plain text."""
    try:
        return turn_markers(tokenizer)
    except ConfigError as error:
        _log.warning("%s: it writes no conversations", error)
        return None


def _refused(role: str, path: str, error: Exception) -> ConfigError:
    reason = str(error).partition("\n")[0]
    return ConfigError(f"{role} {path!r} cannot be loaded by transformers: {reason}")
