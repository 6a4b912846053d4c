"""Attention over the block cache from tensors alone, so that a forward of one shape can be captured once.

A step's rows are described by small integer tensors on the device: which rows are whose, where each is put,
and what it sees (``Visibility``). What computes attention from that is an :class:`AttendPaged`; the one here
gathers blocks with torch's operators, runs anywhere, and is what the others are checked against.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from specray.engine.attention.base import HeadNorm, Rotary, rotate_heads
from specray.engine.cache.state_pool import StateRows, write_table
from specray.engine.step import (
    NUM_COLUMNS,
    AttentionStep,
    HeadShape,
    KVCache,
    PagedBatch,
    SequenceRows,
    Slots,
)
from specray.engine.visibility import is_visible

_ALIGNED_INTS = 4
"""Integers of 4 bytes between the places where a part of a packed batch may start."""


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
class BatchShape:
    """The sizes of a batch's tensors."""

    num_sequences: int
    num_rows: int
    max_num_blocks: int
    """Most blocks of one sequence."""
    max_rows: int
    """Most rows of one sequence."""
    has_masks: bool = False
    has_states: bool = False
    """Whether recurrent layers read the batch, too."""

    @property
    def sizes(self) -> tuple[int, ...]:
        rows, sequences = self.num_rows, self.num_sequences
        states = (sequences * NUM_COLUMNS,) if self.has_states else ()
        return (2 * rows, *[rows] * 6, sequences + 1, sequences, sequences * self.max_num_blocks, *states)

    @property
    def starts(self) -> list[int]:
        """Where each part starts, and where the last one ends: at multiples of 16 bytes.

        Kernels are compiled once for arguments that lie so, and once more for each combination that does not.
        """
        return [0, *itertools.accumulate(-(-size // _ALIGNED_INTS) * _ALIGNED_INTS for size in self.sizes)]


class HostBatch:
    """A batch as it is written on the host, in one array, so that one copy takes it to the device.

    Args:
        spare_slot: slot of padding rows; never read.
    """

    def __init__(self, shape: BatchShape, *, block_size: int, spare_slot: int) -> None:
        self.shape = shape
        self._block_size = block_size
        self._spare_slot = spare_slot
        self.packed = np.zeros(shape.starts[-1], np.int32)
        views = split_packed(self.packed, shape)
        self._ancestors = views[0].view(np.int64)
        self._token_ids, self._positions, self._slots = views[1:4]
        self._kv_indices, self._prefix_lens, self._first_indices = views[4:7]
        self._first_rows, self._lengths, self._tables, *self._states = views[7:]

    def fill(
        self,
        rows: Sequence[SequenceRows],
        token_ids: Sequence[int],
        *,
        num_ahead: Sequence[int] = (),
        states: Sequence[StateRows] = (),
    ) -> None:
        """Writes a step; what of the shape it does not use is padding.

        Args:
            num_ahead: of each sequence, tokens after its rows whose blocks are written too; empty: none.
            states: the same rows as recurrent layers see them, if there are any.
        """
        shape, count = self.shape, len(rows)
        num_used = len(token_ids)
        assert count <= shape.num_sequences and num_used <= shape.num_rows, (count, num_used, shape)
        self._token_ids[:num_used] = token_ids
        for index, item in enumerate(rows):
            self._fill_rows(index, item, num_ahead[index] if num_ahead else 0)
        self._token_ids[num_used:] = 0
        self._positions[num_used:] = 0
        self._slots[num_used:] = self._spare_slot
        self._kv_indices[num_used:] = 0
        self._prefix_lens[num_used:] = 0
        self._first_indices[num_used:] = 0
        # Padding sees its own, as every row does.
        self._ancestors[num_used:] = 1
        # Padding sequences are empty, except that where all have one row, so have they.
        all_single = shape.num_rows == shape.num_sequences
        self._first_rows[count:] = range(count, shape.num_sequences + 1) if all_single else num_used
        self._lengths[count:] = 1
        for table in self._states:
            write_table(table, states)

    def _fill_rows(self, index: int, item: SequenceRows, num_ahead: int) -> None:
        assert item.num_rows <= self.shape.max_rows, (item, self.shape)
        first, last = item.first_row, item.first_row + item.num_rows
        if item.visibility:
            assert self.shape.has_masks, (item, self.shape)
            columns = [
                (row.position, row.kv_index, row.prefix_len, row.first_index, row.signed_ancestors)
                for row in item.visibility
            ]
            positions, indices, prefix_lens, first_indices, ancestors = np.array(columns, np.int64).T
        else:
            positions = indices = prefix_lens = first_indices = np.arange(
                item.start, item.end, dtype=np.int32
            )
            ancestors = np.ones((), np.int64)
        num_blocks = -(-(item.end + num_ahead) // self._block_size)
        # Of fewer, one would be broadcast over the whole table.
        assert len(item.block_ids) >= num_blocks, (item, self._block_size)
        table = self._tables[index]
        table[:num_blocks] = item.block_ids[:num_blocks]
        self._positions[first:last] = positions
        self._slots[first:last] = table[indices // self._block_size] * self._block_size
        self._slots[first:last] += (indices % self._block_size).astype(np.int32)
        self._kv_indices[first:last] = indices
        self._prefix_lens[first:last] = prefix_lens
        self._first_indices[first:last] = first_indices
        self._ancestors[first:last] = ancestors
        self._first_rows[index] = first
        self._lengths[index] = item.end


class DeviceBatch:
    """Tensors of a fixed shape at a fixed place, filled from a :class:`HostBatch` of that shape."""

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        self._shape = shape
        self.packed = torch.zeros(shape.starts[-1], dtype=torch.int32, device=device)
        self.views = split_packed(self.packed, shape)

    @property
    def token_ids(self) -> torch.Tensor:
        """``[num_rows]``, int32."""
        token_ids: torch.Tensor = self.views[1]
        return token_ids

    def load(self, host: HostBatch) -> None:
        """Copies the host's array; returns when it may be written again."""
        # CUDA has read memory that is not pinned when such a copy returns, though the copy may not be done.
        self.packed.copy_(torch.from_numpy(host.packed), non_blocking=True)

    def batch(self) -> PagedBatch:
        """The step that was loaded last; part of what is captured."""
        ancestors, _, positions, slots, kv_indices, prefix_lens, first_indices, *others = self.views
        first_rows, lengths, tables, *states = others
        return PagedBatch(
            first_rows,
            lengths,
            tables,
            slots.long(),
            positions,
            kv_indices,
            prefix_lens,
            first_indices,
            ancestors.view(torch.int64),
            self._shape.max_rows,
            self._shape.has_masks,
            states[0] if states else None,
        )


def make_batch(rows: Sequence[SequenceRows], block_size: int, device: torch.device) -> PagedBatch:
    """The batch of one step in a shape of its own."""
    num_rows = sum(item.num_rows for item in rows)
    shape = BatchShape(
        num_sequences=len(rows),
        num_rows=num_rows,
        max_num_blocks=max(-(-item.end // block_size) for item in rows),
        max_rows=max(item.num_rows for item in rows),
        has_masks=any(item.visibility for item in rows),
    )
    host = HostBatch(shape, block_size=block_size, spare_slot=0)
    host.fill(rows, [0] * num_rows)
    on_device = DeviceBatch(shape, device)
    on_device.load(host)
    return on_device.batch()


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


def split_packed(packed: Any, shape: BatchShape) -> list[Any]:
    parts = [packed[start : start + size] for start, size in zip(shape.starts, shape.sizes, strict=False)]
    parts[9:] = [part.reshape(shape.num_sequences, -1) for part in parts[9:]]
    return parts
