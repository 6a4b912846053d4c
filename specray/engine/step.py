"""What a forward pass is given: the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specray.engine.attention.sdpa import AttentionStep, Slots


@dataclass(frozen=True, slots=True)
class Step:
    """One ragged forward: the new tokens of all sequences, one after the other."""

    token_ids: torch.Tensor  # [num_rows], int64
    positions: Slots  # of each row in its sequence; a slice for a single sequence
    attention: AttentionStep
    logit_rows: Slots | None  # the rows whose logits are wanted, in order; None: all


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps per token on this rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Forward(Protocol):
    """A model's forward pass over the block cache."""

    @property
    def name(self) -> str:
        """``lowered`` or ``generic``."""
        ...

    @property
    def cache_shape(self) -> CacheShape: ...

    def __call__(self, step: Step) -> torch.Tensor:
        """Fills the cache and returns the logits ``[number of logit_rows, vocab_size]``, float32."""
        ...
