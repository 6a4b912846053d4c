"""Attention over the block cache with torch's SDPA, for steps whose sequences differ in length.

A step's new tokens are rows ``0..num_rows - 1``, sequence after sequence. Each layer first writes the rows'
keys and values to their slots, then attends; so a row sees all that is before it in its sequence, and itself:

    positions of one sequence:   [0 ............ start) [start ......... start + num_rows)
                                  valid in the cache     written by this step, causal inside

Sequences whose blocks are consecutive (always so on CPU, where one block holds a whole sequence) are read as
views; others are gathered. Rows of branches and trees see what ``visibility.Visibility`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specray.engine.attention.base import HeadNorm, Rotary, rotate_heads
from specray.engine.attention.scores import ScoreRule, attend_by_rule
from specray.engine.step import AttentionStep, HeadShape, SequenceRows, Slots
from specray.engine.visibility import Visibility, is_visible


class _Context(NamedTuple):
    """What the rows of one sequence may see."""

    slots: Slots
    mask: torch.Tensor | None  # [num_rows * group_size, num_slots], additive; None: everything is visible


class SdpaStep:
    """The attention of one step, sequence by sequence. Layers share what does not depend on them."""

    def __init__(self, step: AttentionStep) -> None:
        self._first_index = step.first_index
        self.rows = step.rows
        self.cache = step.cache
        self._contexts: dict[tuple[int, int | None, int], _Context] = {}
        """Contexts by index of the sequence, sliding window and query heads per kv head."""

    @cached_property
    def write_slots(self) -> Slots:
        """The slot of every row."""
        device, block_size = self.cache.layers[0].device, self.cache.block_size
        spans = [_write_slots(rows, block_size, device) for rows in self.rows]
        if len(spans) == 1:
            return spans[0]
        return torch.cat(
            [torch.arange(s.start, s.stop, device=device) if isinstance(s, slice) else s for s in spans]
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys_values: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        rule: ScoreRule | None = None,
        latent_dim: int = 0,
    ) -> torch.Tensor:
        """Writes the rows' keys and values, then attends.

        Args:
            query: ``[num_rows, num_heads, key_dim]``; head ``h`` uses kv head ``h // group_size``.
            keys_values: as ``BlockCache.write`` wants them, the keys before the values.
            scale: factor on the dot products.
            window: sliding window: a row sees itself and the ``window - 1`` positions before it.
            rule: how weights come from scores; None: by a softmax alone.
            latent_dim: first numbers of a key that are its value; 0: values are stored.

        Returns:
            ``[num_rows, num_heads * value_dim]``.
        """
        self.cache.write(layer, self.write_slots, keys_values)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if latent_dim:
            values = keys.narrow(3, 0, latent_dim)
        outputs = []
        for index, rows in enumerate(self.rows):
            own = query if len(self.rows) == 1 else query.narrow(0, rows.first_row, rows.num_rows)
            context = self._context(index, window, query.shape[1] // keys.shape[0], own)
            outputs.append(_attend_rows(own, keys, values, context, scale, rule))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _context(self, index: int, window: int | None, group_size: int, query: torch.Tensor) -> _Context:
        context = self._contexts.get((index, window, group_size))
        if context is None:
            rows = self.rows[index]
            first = self._first_index
            if window is not None:
                first = max(first, rows.start - window + 1)
            slots = sequence_slots(rows.block_ids, first, rows.end, self.cache.block_size, query.device)
            needs_mask = rows.num_rows > 1 or rows.visibility
            mask = _mask(rows, first, window, group_size, query) if needs_mask else None
            context = self._contexts[index, window, group_size] = _Context(slots, mask)
        return context


def _write_slots(rows: SequenceRows, block_size: int, device: torch.device) -> Slots:
    if not rows.visibility:
        return sequence_slots(rows.block_ids, rows.start, rows.end, block_size, device)
    indices = [row.kv_index for row in rows.visibility]
    return torch.tensor(
        [rows.block_ids[index // block_size] * block_size + index % block_size for index in indices],
        device=device,
    )


def sequence_slots(
    block_ids: Sequence[int], first: int, last: int, block_size: int, device: torch.device
) -> Slots:
    """Slots of the positions ``first..last - 1`` of a sequence; a slice when they are consecutive."""
    first_block, last_block = first // block_size, -(-last // block_size)
    assert last_block <= len(block_ids), f"{last} tokens do not fit {len(block_ids)} blocks of {block_size}"
    needed = block_ids[first_block:last_block]
    base = needed[0]
    if all(block_id == base + i for i, block_id in enumerate(needed)):
        shift = (base - first_block) * block_size
        return slice(first + shift, last + shift)
    positions = torch.arange(first, last, device=device)
    table = torch.tensor(needed, device=device)
    return table[positions // block_size - first_block] * block_size + positions % block_size


def _mask(
    rows: SequenceRows, first: int, window: int | None, group_size: int, like: torch.Tensor
) -> torch.Tensor:
    """Additive mask ``[num_rows * group_size, end - first]``: 0 where a row may look, -inf elsewhere."""
    keys = torch.arange(first, rows.end, device=like.device)
    if rows.visibility:
        is_hidden = ~_dense(rows.visibility, keys, window).repeat_interleave(group_size, 0)
    else:
        queries = torch.arange(rows.start, rows.end, device=like.device)
        queries = queries.repeat_interleave(group_size)[:, None]
        is_hidden = keys > queries
        if window is not None:
            is_hidden |= keys <= queries - window
    mask = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(is_hidden, float("-inf"))


def _dense(visibility: Sequence[Visibility], keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """``[len(visibility), len(keys)]``: which of the KV indices ``keys`` a row sees."""
    table = torch.tensor(
        [(row.prefix_len, row.first_index, row.signed_ancestors) for row in visibility], device=keys.device
    )
    return is_visible(keys, table[:, 0], table[:, 1], table[:, 2], window)


def _attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: _Context,
    scale: float,
    rule: ScoreRule | None,
) -> torch.Tensor:
    """The rows of one sequence.

    Kv heads are the batch, and the query heads that share one are further rows of it: nothing is expanded,
    and one row's result comes out in the order of its heads.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = keys.shape[0], values.shape[3]
    group_size = num_heads // num_kv_heads
    if num_rows == 1:
        grouped = query.view(num_kv_heads, 1, group_size, head_dim)
    else:
        by_head = query.view(num_rows, num_kv_heads, group_size, head_dim).transpose(0, 1)
        grouped = by_head.reshape(num_kv_heads, 1, num_rows * group_size, head_dim)
    seen = select_slots(keys, context.slots), select_slots(values, context.slots)
    if rule is None:
        output = F.scaled_dot_product_attention(grouped, *seen, attn_mask=context.mask, scale=scale)
    else:
        output = attend_by_rule(grouped, *seen, context.mask, scale, rule)
    if num_rows == 1:
        return output.view(1, num_heads * value_dim)
    by_row = output.view(num_kv_heads, num_rows, group_size, value_dim).transpose(0, 1)
    return by_row.reshape(num_rows, num_heads * value_dim)


def select_slots(heads: torch.Tensor, slots: Slots) -> torch.Tensor:
    """The slots of ``[num_kv_heads, 1, num_slots, head_dim]``."""
    if isinstance(slots, slice):
        return heads.narrow(2, slots.start, slots.stop - slots.start)
    return heads.index_select(2, slots)


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """Implements ``base.Attention`` with torch's operators."""

    rotary: Rotary
    shape: HeadShape

    def prepare(self, step: AttentionStep, positions: Slots) -> _PlainStep:
        return _PlainStep(self, SdpaStep(step), *self.rotary.at(positions))


@dataclass(frozen=True, slots=True)
class _PlainStep:
    attention: PlainAttention
    step: SdpaStep
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
        shape = self.attention.shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated = heads.narrow(1, 0, shape.num_heads + shape.num_kv_heads)
        rotate_heads(rotated, head_norm, self.cos, self.sin)
        stored = heads.narrow(1, shape.num_heads, shape.num_stored)
        return self.step.attend(
            layer,
            heads.narrow(1, 0, shape.num_heads),
            stored.flatten(1) if shape.latent_dim else stored,
            scale=shape.scale,
            window=window,
            rule=None if sinks is None else ScoreRule(sinks=sinks),
            latent_dim=shape.latent_dim,
        )
