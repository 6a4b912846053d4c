"""Attention over the block cache from tensors alone, so that a forward of one shape can be captured once.

A step's rows are described by small integer tensors on the device: which rows are whose, where each is put,
and what it sees (``Visibility``). What computes attention from that is an :class:`AttendPaged`; the one here
gathers blocks with torch's operators, runs anywhere, and is what the others are checked against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from specray.engine.attention.base import HeadNorm, Rotary, rotate_heads
from specray.engine.attention.packed import make_batch
from specray.engine.step import (
    AttentionStep,
    HeadShape,
    KVCache,
    PagedBatch,
    Slots,
)
from specray.engine.visibility import is_visible


class AttendPaged(Protocol):
    """Computes attention of rows whose keys and values are in the cache."""

    def __call__(
        self,
        query: torch.Tensor,
        layer: torch.Tensor,
        batch: PagedBatch,
        *,
        block_size: int,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends.

        Args:
            query: ``[num_rows, num_heads, head_dim]``.
            layer: ``[num_slots, 2 * num_kv_heads, head_dim]``, a slot's keys before its values; of latents
                ``[num_slots, head_dim]``.
            scale: factor on the dot products.
            window: sliding window: a row sees itself and the ``window - 1`` positions before it.
            sinks: score of each query head's sink, ``[num_heads]``, float32; None: there are none.

        Returns:
            ``[num_rows, num_heads * value_dim]``; rows that belong to nobody hold anything.
        """
        ...


class StoreRows(Protocol):
    """Norms and rotates queries and keys, and puts keys and values into the cache."""

    def __call__(
        self,
        heads: torch.Tensor,
        layer: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        head_norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        """Stores a step's rows.

        Args:
            heads: ``[num_rows, num_heads + 2 * num_kv_heads, head_dim]``; its contents are lost. Of latents
                there is one head beside those of queries.
            layer: ``[num_slots, 2 * num_kv_heads, head_dim]``, or ``[num_slots, head_dim]``.
            slots: ``[num_rows]``.
            cos, sin: the rows' tables, as ``Rotary.at`` gives them.
            head_norm: what queries and keys are normed with before; None: nothing.

        Returns:
            The rotated queries, ``[num_rows, num_heads, head_dim]``.
        """
        ...


def store_rows(
    heads: torch.Tensor,
    layer: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Implements :class:`StoreRows` with torch's operators."""
    if layer.ndim == 2:
        # Of latents, normed before: a key is all that is stored, and its last numbers are rotated.
        rotate_heads(heads, None, cos, sin)
        layer.index_copy_(0, slots, heads[:, -1])
        return heads[:, :-1]
    num_stored = layer.shape[1]
    num_heads = heads.shape[1] - num_stored
    rotate_heads(heads.narrow(1, 0, num_heads + num_stored // 2), head_norm, cos, sin)
    layer.index_copy_(0, slots, heads.narrow(1, num_heads, num_stored))
    return heads.narrow(1, 0, num_heads)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Implements ``base.Attention`` over tensors that describe the step."""

    rotary: Rotary
    shape: HeadShape
    attend_paged: AttendPaged
    store: StoreRows = store_rows

    def prepare(self, step: AttentionStep, positions: Slots) -> _PagedStep:
        """What the layers of one step share."""
        batch = step.batch
        if batch is None:
            batch = make_batch(step.rows, step.cache.block_size, step.cache.layers[0].device)
        return _PagedStep(self, step.cache, batch, *self.rotary.at(positions))


@dataclass(frozen=True, slots=True)
class _PagedStep:
    attention: PagedAttention
    cache: KVCache
    batch: PagedBatch
    cos: torch.Tensor
    sin: torch.Tensor

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape, stored = self.attention.shape, self.cache.layers[layer]
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        query = self.attention.store(heads, stored, self.batch.slots, self.cos, self.sin, head_norm)
        return self.attention.attend_paged(
            query,
            stored,
            self.batch,
            block_size=self.cache.block_size,
            scale=shape.scale,
            window=window,
            sinks=sinks,
        )


def attend_gathered(
    query: torch.Tensor,
    layer: torch.Tensor,
    batch: PagedBatch,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    latent_dim: int = 0,
) -> torch.Tensor:
    """Implements :class:`AttendPaged` with torch's operators: gathers every sequence's blocks.

    Its shapes depend on those of its arguments only, never on their contents, so it can be captured.

    Args:
        latent_dim: first numbers of a key that are its value; 0: values are stored.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = 1 if latent_dim else layer.shape[1] // 2
    num_sequences, max_rows = batch.lengths.shape[0], batch.max_rows
    first_rows, counts = batch.first_rows[:-1], batch.first_rows.diff()
    offsets = torch.arange(max_rows, device=query.device)
    # [num_sequences, max_rows]: every sequence's rows, the last one again where it has fewer.
    index = (first_rows[:, None] + offsets.minimum((counts[:, None] - 1).clamp(min=0))).clamp(
        max=num_rows - 1
    )
    both = _gather(layer.view(len(layer), -1, head_dim), batch.block_tables, block_size)
    keys, values = both[:, :num_kv_heads], both[:, num_kv_heads:]
    if latent_dim:
        values = keys[..., :latent_dim]
    group_size = num_heads // num_kv_heads
    grouped = query[index].view(num_sequences, max_rows, num_kv_heads, group_size, head_dim)
    mask = _visible(batch, index, keys.shape[2], window).repeat(1, group_size, 1)[:, None]
    if sinks is not None:
        keys, values, mask = _with_sinks(keys, values, mask, sinks.to(query.dtype))
    output = F.scaled_dot_product_attention(
        grouped.permute(0, 2, 3, 1, 4).reshape(num_sequences, num_kv_heads, group_size * max_rows, head_dim),
        keys,
        values,
        attn_mask=mask,
        scale=scale,
    )
    dense = output.view(num_sequences, num_kv_heads, group_size, max_rows, -1).permute(0, 3, 1, 2, 4)
    rows = torch.arange(num_rows, dtype=torch.int32, device=query.device)
    owners = torch.searchsorted(batch.first_rows[1:], rows, right=True).clamp(max=num_sequences - 1)
    places_in_owner = (rows - first_rows[owners]).clamp(0, max_rows - 1)
    return dense[owners, places_in_owner].reshape(num_rows, -1)


def _with_sinks(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and additive mask with the sink as one key more: it and its value are zero.

    Args:
        keys, values: ``[num_sequences, num_kv_heads, num_keys, head_dim]``.
        mask: of what is visible, ``[num_sequences, 1, group_size * max_rows, num_keys]``.
        sinks: ``[num_heads]``.
    """
    num_kv_heads, num_rows = keys.shape[1], mask.shape[2]
    by_row = sinks.view(num_kv_heads, -1, 1)
    by_row = by_row.expand(-1, -1, num_rows // by_row.shape[1]).reshape(1, num_kv_heads, num_rows, 1)
    hidden = torch.zeros_like(mask, dtype=sinks.dtype).masked_fill_(~mask, float("-inf"))
    both = (each.expand(len(mask), num_kv_heads, -1, -1) for each in (hidden, by_row))
    return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), torch.cat(tuple(both), -1)


def _gather(layer: torch.Tensor, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[num_sequences, 2 * num_kv_heads, max_num_blocks * block_size, head_dim]``."""
    blocks = layer.view(-1, block_size, *layer.shape[1:])
    return blocks[tables].flatten(1, 2).transpose(1, 2)


def _visible(batch: PagedBatch, index: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """``[num_sequences, max_rows, num_keys]``: which KV indices each row sees."""
    keys = torch.arange(num_keys, device=index.device)
    if batch.has_masks:
        return is_visible(
            keys, batch.prefix_lens[index], batch.first_indices[index], batch.ancestors[index], window
        )
    positions = batch.positions[index][:, :, None]
    seen = keys <= positions
    return seen if window is None else seen & (keys > positions - window)
