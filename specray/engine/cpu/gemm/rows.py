"""Rows as AMX takes them: 32 rows at a time, of these 32 features at a time, in such a block row by row.

A tile of rows is one piece of memory, and so is what a panel of weights makes of 32 rows. Row by row instead,
both are as many lines as there are rows, some KiB apart, and for each a core waits for a line that it lost to
the weights: a quarter of the time that 64 rows take. Up to 32 rows are a block high, so one row is the same
either way.

A kernel finds features of a row by two steps, from row to row and from block to block; rows that follow each
other have steps too (``FlatRows``), and one kernel does for both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import Kernel, Team, as_pointer

HEIGHT = 32
"""Rows of a block, at most: two tiles."""
BLOCK = 32
"""Features of a block: a tile's line."""
LINE = 2 * BLOCK
"""Bytes of a block's row."""
_NUM_ARGS = 9


@dataclass(frozen=True, slots=True)
class PackedRows:
    """bfloat16 rows in blocks.

    Args:
        data: ``[groups, blocks, height, 32]``. What lies behind the last row matters to nobody.
    """

    data: torch.Tensor
    num_rows: int

    @classmethod
    def empty(cls, team: Team, num_rows: int, num_features: int) -> PackedRows:
        """Room for rows, whose features are a multiple of 32."""
        return cls(team.empty(packed_shape(num_rows, num_features), torch.bfloat16), num_rows)

    @property
    def num_features(self) -> int:
        return self.data.shape[1] * BLOCK

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    @property
    def row_step(self) -> int:
        """Numbers from a row to the next of its group."""
        return BLOCK

    @property
    def block_step(self) -> int:
        """Numbers from a block to the next of its rows."""
        return self.data.shape[2] * BLOCK


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows that follow each other: ``[num_rows, num_features]``, contiguous."""

    data: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def num_features(self) -> int:
        return self.data.shape[1]

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    @property
    def row_step(self) -> int:
        """Numbers from a row to the next."""
        return self.data.shape[1]

    @property
    def block_step(self) -> int:
        """Numbers from 32 features of a row to the next."""
        return BLOCK


def packed_shape(num_rows: int, num_features: int) -> tuple[int, int, int, int]:
    """Of packed rows."""
    return -(-num_rows // HEIGHT), num_features // BLOCK, min(num_rows, HEIGHT), BLOCK


@kernel()
def row_place(row: int, num_features: int, row_step: int) -> int:
    """Where a row begins, in numbers."""
    return row // HEIGHT * HEIGHT * num_features + row % HEIGHT * row_step


def pack(rows: torch.Tensor, team: Team) -> PackedRows:
    """Contiguous bfloat16 rows ``[num_rows, num_features]``, packed."""
    packed = PackedRows.empty(team, *rows.shape)
    _copy(FlatRows(rows), packed, 0, None, team)
    return packed


def last_rows(rows: PackedRows, first: int, team: Team) -> PackedRows:
    """The rows from one on."""
    taken = PackedRows.empty(team, rows.num_rows - first, rows.num_features)
    _copy(rows, taken, first, None, team)
    return taken


def some_rows(rows: PackedRows, indexes: torch.Tensor, team: Team) -> PackedRows:
    """The rows of these numbers (int64). Not to be recorded: the numbers would stay the same."""
    taken = PackedRows.empty(team, len(indexes), rows.num_features)
    _copy(rows, taken, 0, indexes.contiguous(), team)
    return taken


def _copy(
    source: PackedRows | FlatRows, target: PackedRows, first: int, indexes: torch.Tensor | None, team: Team
) -> None:
    if target.num_rows == 0:
        return
    args = np.array(
        [
            *(source.address, source.row_step, source.block_step),
            *(target.address, target.block_step, target.num_rows, target.num_features),
            *(first, 0 if indexes is None else indexes.data_ptr()),
        ],
        dtype=np.int64,
    )
    team.run(_copy_kernel(), args.ctypes.data, team.size if target.num_rows > HEIGHT else 1)


@functools.cache
def _copy_kernel() -> Kernel:
    return Kernel("copy-rows", _NUM_ARGS, _make_copy)


def _make_copy() -> Any:
    line = vectors(LINE // 4, "float32")
    load, store = line.load, line.store

    def copy(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        source, row_step, block_step, target, target_step, num_rows, size, start, indexes = (
            args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8]
        )  # fmt: skip
        numbers = carray(as_pointer(indexes), (num_rows,), np.int64)
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            number = numbers[row] if indexes else start + row
            there = source + 2 * row_place(number, size, row_step)
            here = target + 2 * row_place(row, size, BLOCK)
            for block in range(size // BLOCK):
                store(here + 2 * block * target_step, 0, load(there + 2 * block * block_step, 0))

    return copy
