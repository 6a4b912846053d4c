"""A model as it comes from its files: the result of loading, and what a forward is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, or to become our own decoder, with what the engine must know of it."""

    model: PreTrainedModel
    config: PreTrainedConfig  # of the text part
    name: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    dtype: torch.dtype
    device: torch.device
