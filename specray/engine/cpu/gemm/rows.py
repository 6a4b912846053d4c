"""Row layouts: packed rows for AMX, in blocks of 32 rows by 32 features, and flat rows.

In packed rows, a tile is contiguous, and so is the output of a weight panel for 32 rows. In flat rows each is
one cache line per row, KiB apart, which weights evict from the cache: a quarter of the time of 64 rows. A
block has as many rows as there are, up to 32, so one row is the same in both layouts.

A kernel addresses features by two steps, from row to row and from block to block. Flat rows have both too
(``FlatRows``), so one kernel serves both layouts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import Kernel, ThreadPool, as_pointer

HEIGHT = 32
"""Maximum rows of a block: two tiles."""
BLOCK = 32
"""Features of a block: one row of a tile."""
LINE = 2 * BLOCK
"""Bytes of a block's row."""
_NUM_ARGS = 9


@dataclass(frozen=True, slots=True)
class PackedRows:
    """bfloat16 rows in blocks.

    Args:
        data: ``[groups, blocks, height, 32]``; undefined after the last row.
    """

    data: torch.Tensor
    num_rows: int

    @classmethod
    def empty(cls, thread_pool: ThreadPool, num_rows: int, num_features: int) -> PackedRows:
        """Allocates uninitialised rows; ``num_features`` is a multiple of 32."""
        return cls(thread_pool.empty(packed_shape(num_rows, num_features), torch.bfloat16), num_rows)

    @property
    def num_features(self) -> int:
        return self.data.shape[1] * BLOCK

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    @property
    def row_step(self) -> int:
        """Elements from a row to the next of its group."""
        return BLOCK

    @property
    def block_step(self) -> int:
        """Elements from a block to the next block of its rows."""
        return self.data.shape[2] * BLOCK


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Contiguous rows ``[num_rows, num_features]``."""

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
        """Elements from a row to the next."""
        return self.data.shape[1]

    @property
    def block_step(self) -> int:
        """Elements from 32 features of a row to the next 32."""
        return BLOCK


def packed_shape(num_rows: int, num_features: int) -> tuple[int, int, int, int]:
    return -(-num_rows // HEIGHT), num_features // BLOCK, min(num_rows, HEIGHT), BLOCK


@kernel()
def row_place(row: int, num_features: int, row_step: int) -> int:
    """Offset of a row, in elements."""
    return row // HEIGHT * HEIGHT * num_features + row % HEIGHT * row_step


def pack(rows: torch.Tensor, thread_pool: ThreadPool) -> PackedRows:
    """Packs contiguous bfloat16 rows ``[num_rows, num_features]``."""
    packed = PackedRows.empty(thread_pool, *rows.shape)
    _copy(FlatRows(rows), packed, 0, None, thread_pool)
    return packed


def last_rows(rows: PackedRows, first: int, thread_pool: ThreadPool) -> PackedRows:
    """Copies the rows from ``first`` on."""
    taken = PackedRows.empty(thread_pool, rows.num_rows - first, rows.num_features)
    _copy(rows, taken, first, None, thread_pool)
    return taken


def some_rows(rows: PackedRows, indexes: torch.Tensor, thread_pool: ThreadPool) -> PackedRows:
    """Copies the rows at int64 ``indexes``. Not for CPU graphs: a replay would use the recorded indexes."""
    taken = PackedRows.empty(thread_pool, len(indexes), rows.num_features)
    _copy(rows, taken, 0, indexes.contiguous(), thread_pool)
    return taken


def _copy(
    source: PackedRows | FlatRows,
    target: PackedRows,
    first: int,
    indexes: torch.Tensor | None,
    thread_pool: ThreadPool,
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
    thread_pool.run(_copy_kernel(), args.ctypes.data, thread_pool.size if target.num_rows > HEIGHT else 1)


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
