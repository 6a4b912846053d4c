"""Decodes many rows side by side, with the fast loop for Llama and the library's own for other models."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import LlamaForCausalLM

from specray.train.sample import CachedDecoder


class RowDecoder(Protocol):
    """A model with its cache: one prompt forward, then one token of each row at a time."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Appends ids ``[num_rows, length]``; returns the last logits ``[num_rows, vocab_size]``."""
        ...


class LibraryDecoder:
    """Implements ``RowDecoder`` for any causal language model of transformers, with the library's cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``RowDecoder``."""
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def row_decoder(model: Any, *, num_rows: int, max_len: int) -> RowDecoder:
    """The decoder for a model: the fast loop knows Llama's layers alone."""
    if type(model) is LlamaForCausalLM:
        return CachedDecoder(model, num_rows=num_rows, max_len=max_len)
    return LibraryDecoder(model)
