"""Decodes many rows side by side, with the fast loop for Llama and the library's own for other models."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class RowDecoder(Protocol):
    """A model with its cache: one prompt forward, then one token of each row at a time."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Appends ids ``[num_rows, length]``; returns the last logits ``[num_rows, vocab_size]``."""
        ...


class CachedDecoder:
    """A Llama model with keys and values in place: one prompt forward, then one token at a time.

    Rows have equal lengths. Query heads of a group read their key/value head without copies of it,
    which is what makes wide batches cheap.
    """

    def __init__(self, model: LlamaForCausalLM, *, num_rows: int, max_len: int) -> None:
        config = model.config
        self._model = model
        self._num_kv_heads = int(config.num_key_value_heads or config.num_attention_heads)
        self._head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
        shape = (num_rows, self._num_kv_heads, max_len, self._head_dim)
        self._keys = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in model.model.layers]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._num_computed_tokens = 0

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Appends `ids` [n, length] (any length first, then 1); returns the last logits [n, vocab_size]."""
        start, end = self._num_computed_tokens, self._num_computed_tokens + ids.shape[1]
        assert start == 0 or ids.shape[1] == 1
        core = self._model.model
        hidden = core.embed_tokens(ids)
        positions = torch.arange(start, end, device=ids.device)[None]
        rotary = core.rotary_emb(hidden, position_ids=positions)
        for index, layer in enumerate(core.layers):
            attended = self._attend(index, layer.self_attn, layer.input_layernorm(hidden), rotary)
            hidden = hidden + layer.self_attn.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self._num_computed_tokens = end
        logits: torch.Tensor = self._model.lm_head(core.norm(hidden[:, -1]))
        return logits

    def _attend(
        self, index: int, attention: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        num_rows, length, _ = hidden.shape
        start = self._num_computed_tokens
        queries, keys, values = (
            projection(hidden).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        self._keys[index][:, :, start : start + length] = keys
        self._values[index][:, :, start : start + length] = values
        if start == 0:
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).flatten(2)
        past_keys = self._keys[index].flatten(0, 1)[:, : start + 1]
        past_values = self._values[index].flatten(0, 1)[:, : start + 1]
        grouped = queries.reshape(num_rows * self._num_kv_heads, -1, self._head_dim)
        scores = torch.bmm(grouped, past_keys.transpose(1, 2)) * self._head_dim**-0.5
        mixed = torch.bmm(scores.float().softmax(-1).to(scores.dtype), past_values)
        return mixed.reshape(num_rows, 1, -1)


class LibraryDecoder:
    """Implements ``RowDecoder`` for any causal language model of transformers, with the library's cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def row_decoder(model: Any, *, num_rows: int, max_len: int) -> RowDecoder:
    """The decoder for a model: the fast loop knows Llama's layers alone."""
    if type(model) is LlamaForCausalLM:
        return CachedDecoder(model, num_rows=num_rows, max_len=max_len)
    return LibraryDecoder(model)
