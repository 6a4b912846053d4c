"""Products of each head's numbers with a weight of its own, in one kernel.

A number's products are added up in the order of the input features, whatever rows are next to it: four rows
share a reading of the weights, and one alone is computed by the same additions.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import MAX_PARTS, Kernel, ThreadPool, as_pointer

_MAX_LANES = 32
_ROWS_AT_ONCE = 4
_MIN_SHARED_WORK = 65_536
"""Products from which on a second thread pays off."""
(
    _ROWS, _ROW_STEP, _HEAD_STEP, _OUT, _OUT_ROW_STEP, _OUT_HEAD_STEP, _WEIGHT, _NUM_ROWS, _NUM_HEADS,
    _IN, _OUT_SIZE, _REST,
) = range(12)  # fmt: skip
_NUM_ARGS = 12


class KernelHeadProduct:
    """Implements ``layers.latent.HeadProduct``.

    Args:
        weight: ``[num_heads, in_features, out_features]``, bfloat16 or float32.
    """

    __slots__ = ("_args", "_kernel", "_thread_pool", "_weight", "shape")

    def __init__(self, weight: torch.Tensor, thread_pool: ThreadPool) -> None:
        self._weight, self._thread_pool = weight.contiguous(), thread_pool
        num_heads, in_features, out_features = self.shape = weight.shape[0], weight.shape[1], weight.shape[2]
        lanes = next(lanes for lanes in (_MAX_LANES, 16, 8, 4, 2, 1) if out_features % lanes == 0)
        self._kernel = _product_kernel(str(weight.dtype).removeprefix("torch."), lanes)
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[_WEIGHT] = self._weight.data_ptr()
        self._args[[_NUM_HEADS, _IN, _OUT_SIZE]] = num_heads, in_features, out_features

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Not thread-safe."""
        num_heads, _, size = self.shape
        out = self._thread_pool.empty((len(rows), num_heads * size), rows.dtype)
        self.into(rows, out.view(len(rows), num_heads, size))
        return out

    def into(self, rows: torch.Tensor, out: torch.Tensor, *, rest: int = 0) -> None:
        """Multiplies to given memory; copies ``rest`` numbers behind each head's to behind its outputs.

        Not thread-safe.
        """
        assert rows.stride(2) == out.stride(2) == 1, "the numbers of a head follow each other"
        args = self._args
        args[[_ROWS, _ROW_STEP, _HEAD_STEP]] = rows.data_ptr(), rows.stride(0), rows.stride(1)
        args[[_OUT, _OUT_ROW_STEP, _OUT_HEAD_STEP]] = out.data_ptr(), out.stride(0), out.stride(1)
        args[[_NUM_ROWS, _REST]] = len(rows), rest
        is_shared = len(rows) * self._weight.numel() >= _MIN_SHARED_WORK and self._thread_pool.size > 1
        num_parts = min(self.shape[0], MAX_PARTS - 1) if is_shared else 1
        self._thread_pool.run(self._kernel, args.ctypes.data, num_parts)


@functools.cache
def _product_kernel(dtype: str, lanes: int) -> Kernel:
    return Kernel(f"heads-{dtype}-{lanes}", _NUM_ARGS, lambda: _make_product(dtype, lanes))


def _make_product(dtype: str, lanes: int) -> Any:
    wide, stored, one = vectors(lanes), vectors(lanes, dtype), vectors(1, dtype)
    load, store, load_one, store_one = stored.load, stored.store, one.load, one.store
    splat, fma, number_of = wide.splat, wide.fma, vectors(1).sum
    zero = np.float32(0.0)

    @kernel()
    def four_rows(rows: int, at: int, step: int, weight: int, first: int, args: Any, out: int) -> None:
        total, total_1, total_2, total_3 = splat(zero), splat(zero), splat(zero), splat(zero)
        for feature in range(args[_IN]):
            numbers = load(weight, first + feature * args[_OUT_SIZE])
            total = fma(splat(number_of(load_one(rows, at + feature))), numbers, total)
            total_1 = fma(splat(number_of(load_one(rows, at + step + feature))), numbers, total_1)
            total_2 = fma(splat(number_of(load_one(rows, at + 2 * step + feature))), numbers, total_2)
            total_3 = fma(splat(number_of(load_one(rows, at + 3 * step + feature))), numbers, total_3)
        store(args[_OUT], out, total)
        store(args[_OUT], out + args[_OUT_ROW_STEP], total_1)
        store(args[_OUT], out + 2 * args[_OUT_ROW_STEP], total_2)
        store(args[_OUT], out + 3 * args[_OUT_ROW_STEP], total_3)

    @kernel()
    def one_row(rows: int, at: int, weight: int, first: int, args: Any, out: int) -> None:
        total = splat(zero)
        for feature in range(args[_IN]):
            numbers = load(weight, first + feature * args[_OUT_SIZE])
            total = fma(splat(number_of(load_one(rows, at + feature))), numbers, total)
        store(args[_OUT], out, total)

    def product(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_heads, num_rows, size, step = args[_NUM_HEADS], args[_NUM_ROWS], args[_OUT_SIZE], args[_ROW_STEP]
        for head in range(num_heads * part // num_parts, num_heads * (part + 1) // num_parts):
            source, target = head * args[_HEAD_STEP], head * args[_OUT_HEAD_STEP]
            for column in range(0, size, lanes):
                first = head * args[_IN] * size + column
                row = 0
                while row < num_rows:
                    at, out = source + row * step, target + row * args[_OUT_ROW_STEP] + column
                    if row + _ROWS_AT_ONCE <= num_rows:
                        four_rows(args[_ROWS], at, step, args[_WEIGHT], first, args, out)
                        row += _ROWS_AT_ONCE
                    else:
                        one_row(args[_ROWS], at, args[_WEIGHT], first, args, out)
                        row += 1
            for row in range(num_rows):
                at, out = source + row * step + args[_IN], target + row * args[_OUT_ROW_STEP] + size
                for place in range(args[_REST]):
                    store_one(args[_OUT], out + place, load_one(args[_ROWS], at + place))

    return product
