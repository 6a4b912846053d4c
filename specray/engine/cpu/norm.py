"""RMS norm of rows in one kernel, where torch on CPU runs seven operators."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.cpu.gemm.rows import BLOCK, HEIGHT, PackedRows, row_place
from specray.engine.cpu.simd import vectors
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer

_MAX_LANES = 16
(
    _ROWS, _OUT, _NUM_ROWS, _WEIGHT, _SIZE, _EPS, _BLOCK_STEP, _SCRATCH, _SUMMAND, _ROW_STEP, _OUT_STEP,
    _REST, _NUM_GROUPS,
) = range(13)  # fmt: skip
_NUM_ARGS = 13
MIN_SHARED_SIZE = 65_536
"""Minimum number of elements for which a second thread pays off."""
_SCRATCH_SIZE = HEIGHT * _MAX_LANES * 4 + APART
"""Scratch bytes of a thread."""
_ONE = np.float32(1.0)


class FusedRMSNorm:
    """Computes x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019) with float32 sums.

    Args:
        weight: ``[size]``, or ``[num_groups, size]`` for parts of each row that are normed by themselves,
            float32 or the type of the rows.
        dtype: of the rows, bfloat16 or float32; None: as the weight.
    """

    __slots__ = (
        "_args", "_args_address", "_kernel", "_lanes", "_num_groups", "_number_format", "_size",
        "_thread_pool", "_weight", "_weight_format",
    )  # fmt: skip

    def __init__(
        self, weight: torch.Tensor, eps: float, thread_pool: ThreadPool, dtype: torch.dtype | None = None
    ) -> None:
        self._thread_pool = thread_pool
        self._size = weight.shape[-1]
        self._num_groups = weight.numel() // self._size
        self._weight = weight.contiguous()
        self._lanes = next(lanes for lanes in (_MAX_LANES, 8, 4, 2, 1) if self._size % lanes == 0)
        self._number_format = str(dtype or weight.dtype).removeprefix("torch.")
        self._weight_format = str(weight.dtype).removeprefix("torch.")
        self._kernel = _norm_kernel(self._number_format, self._weight_format, self._lanes)
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[_WEIGHT], self._args[_SIZE] = self._weight.data_ptr(), self._size
        self._args[_NUM_GROUPS] = self._num_groups
        self._args.view(np.float32)[2 * _EPS] = eps
        self._args_address = self._args.ctypes.data

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Norms rows ``[num_rows, num_groups * size]``, each contiguous, to contiguous ones.

        Rows of several groups follow each other. Not thread-safe.
        """
        parts = rows if self._num_groups == 1 else rows.view(-1, self._size)
        out = self._thread_pool.empty((parts.shape[0], parts.shape[1]), rows.dtype)
        return self.into(parts, out).view(rows.shape)

    def into(self, rows: torch.Tensor, out: torch.Tensor, *, rest: int = 0) -> torch.Tensor:
        """Norms rows, each contiguous, to others; copies ``rest`` numbers behind each. Not thread-safe."""
        return self._run(self._kernel, rows, out, rest)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """Adds normed rows to contiguous rows of the same shape. Not thread-safe."""
        assert summand.is_contiguous(), "the summand's rows must follow each other"
        self._args[_SUMMAND] = summand.data_ptr()
        kernel = _norm_kernel(self._number_format, self._weight_format, self._lanes, has_summand=True)
        return self._run(kernel, rows, self._thread_pool.empty((rows.shape[0], rows.shape[1]), rows.dtype), 0)

    def _run(self, kernel: Kernel, rows: torch.Tensor, out: torch.Tensor, rest: int) -> torch.Tensor:
        assert rows.stride(1) == out.stride(1) == 1, "the numbers of a row follow each other"
        args = self._args
        num_parts = self._thread_pool.size if rows.numel() >= MIN_SHARED_SIZE else 1
        args[_ROWS], args[_OUT] = rows.data_ptr(), out.data_ptr()
        args[_NUM_ROWS], args[_REST] = rows.shape[0], rest
        args[_ROW_STEP], args[_OUT_STEP] = rows.stride(0), out.stride(0)
        self._thread_pool.run(kernel, self._args_address, num_parts)
        return out

    def packed(self, rows: PackedRows) -> PackedRows:
        """Norms packed rows with bit-identical results. Not thread-safe."""
        out = PackedRows.empty(self._thread_pool, rows.num_rows, rows.num_features)
        scratch = self._thread_pool.empty(self._thread_pool.size * _SCRATCH_SIZE, torch.uint8)
        args = self._args
        args[_ROWS], args[_OUT], args[_NUM_ROWS] = rows.address, out.address, rows.num_rows
        args[_BLOCK_STEP], args[_SCRATCH] = rows.block_step, scratch.data_ptr()
        is_shared = rows.num_rows * rows.num_features >= MIN_SHARED_SIZE
        self._thread_pool.run(
            _packed_kernel(self._weight_format),
            self._args_address,
            self._thread_pool.size if is_shared else 1,
        )
        return out


@functools.cache
def _norm_kernel(dtype: str, weight_dtype: str, lanes: int, *, has_summand: bool = False) -> Kernel:
    name = f"norm-{dtype}-{weight_dtype}-{lanes}{'-plus' * has_summand}"
    return Kernel(name, _NUM_ARGS, lambda: _make_norm(dtype, weight_dtype, lanes, has_summand=has_summand))


def _make_norm(dtype: str, weight_dtype: str, lanes: int, *, has_summand: bool) -> Any:
    wide, stored, weights = vectors(lanes), vectors(lanes, dtype), vectors(lanes, weight_dtype)
    load, store, load_weight = stored.load, stored.store, weights.load
    splat, mul, fma, total = wide.splat, wide.mul, wide.fma, wide.sum
    one = vectors(1, dtype)
    load_one, store_one = one.load, one.store
    zero = np.float32(0.0)

    def norm(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        eps = carray(as_pointer(address), (2 * _NUM_ARGS,), np.float32)[2 * _EPS]
        size, num_rows = args[_SIZE], args[_NUM_ROWS]
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            first, out = row * args[_ROW_STEP], row * args[_OUT_STEP]
            squares = splat(zero)
            for place in range(first, first + size, lanes):
                numbers = load(args[_ROWS], place)
                squares = fma(numbers, numbers, squares)
            factor = splat(_ONE / np.sqrt(total(squares) / np.float32(size) + eps))
            for place in range(0, size, lanes):
                number = mul(load(args[_ROWS], first + place), factor)
                weight = load_weight(args[_WEIGHT], row % args[_NUM_GROUPS] * size + place)
                if has_summand:
                    summand = load(args[_SUMMAND], row * size + place)
                    store(args[_OUT], out + place, fma(number, weight, summand))
                else:
                    store(args[_OUT], out + place, mul(number, weight))
            for place in range(size, size + args[_REST]):
                store_one(args[_OUT], out + place, load_one(args[_ROWS], first + place))

    return norm


@functools.cache
def _packed_kernel(weight_dtype: str) -> Kernel:
    return Kernel(f"norm-packed-{weight_dtype}", _NUM_ARGS, lambda: _make_packed_norm(weight_dtype))


def _make_packed_norm(weight_dtype: str) -> Any:
    """Norms some rows of a group at a time, block by block; sums in the order of the flat kernel."""
    wide, stored = vectors(_MAX_LANES), vectors(_MAX_LANES, "bfloat16")
    load, store, fetch, keep = stored.load, stored.store, wide.load, wide.store
    load_weight = vectors(_MAX_LANES, weight_dtype).load
    splat, mul, fma, total = wide.splat, wide.mul, wide.fma, wide.sum
    zero = np.float32(0.0)

    def norm(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        eps = carray(as_pointer(address), (2 * _NUM_ARGS,), np.float32)[2 * _EPS]
        rows, out, size, num_rows, step = (
            args[_ROWS], args[_OUT], args[_SIZE], args[_NUM_ROWS], args[_BLOCK_STEP]
        )  # fmt: skip
        squares = args[_SCRATCH] + thread * _SCRATCH_SIZE
        first, last = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
        while first < last:
            count = min(last - first, HEIGHT - first % HEIGHT)
            begin = row_place(first, size, BLOCK)
            for row in range(count):
                keep(squares, row * _MAX_LANES, splat(zero))
            for block in range(size // BLOCK):
                for row in range(count):
                    place = begin + block * step + row * BLOCK
                    low, high = load(rows, place), load(rows, place + _MAX_LANES)
                    summed = fma(high, high, fma(low, low, fetch(squares, row * _MAX_LANES)))
                    keep(squares, row * _MAX_LANES, summed)
            for row in range(count):
                mean = total(fetch(squares, row * _MAX_LANES)) / np.float32(size)
                keep(squares, row * _MAX_LANES, splat(_ONE / np.sqrt(mean + eps)))
            for block in range(size // BLOCK):
                low_weight = load_weight(args[_WEIGHT], block * BLOCK)
                high_weight = load_weight(args[_WEIGHT], block * BLOCK + _MAX_LANES)
                for row in range(count):
                    place, factor = begin + block * step + row * BLOCK, fetch(squares, row * _MAX_LANES)
                    store(out, place, mul(mul(load(rows, place), factor), low_weight))
                    place += _MAX_LANES
                    store(out, place, mul(mul(load(rows, place), factor), high_weight))
            first += count

    return norm
