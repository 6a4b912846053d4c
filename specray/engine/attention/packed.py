"""A step in small integer tensors of a fixed shape, packed on the host and copied to the device at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specray.engine.cache.state_pool import StateRows, write_table
from specray.engine.step import (
    NUM_COLUMNS,
    PagedBatch,
    SequenceRows,
)

_ALIGNED_INTS = 4
"""Integers of 4 bytes between the places where a part of a packed batch may start."""


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


def split_packed(packed: Any, shape: BatchShape) -> list[Any]:
    parts = [packed[start : start + size] for start, size in zip(shape.starts, shape.sizes, strict=False)]
    parts[9:] = [part.reshape(shape.num_sequences, -1) for part in parts[9:]]
    return parts
