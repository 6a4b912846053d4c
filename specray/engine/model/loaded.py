"""A model as it comes from its files: the result of loading, and what a forward is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.model.checkpoint.source import WeightSource
from specray.engine.model.decoder_config import DecoderConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class DecoderSource:
    """What the decoder is built from: its weights are read when it is."""

    config: DecoderConfig
    weights: WeightSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to become a forward, with what the engine must know of it."""

    source: DecoderSource | PreTrainedModel
    """A model of the library is there as it is, for forward hf."""
    name: str
    model_type: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    num_weight_bytes: int
    """Bytes of all weights in ``dtype``, those of other ranks included."""
    dtype: torch.dtype
    device: torch.device
