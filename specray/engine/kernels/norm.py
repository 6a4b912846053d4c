"""RMS norm of rows in one kernel: torch on CPU composes it of seven operators."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.kernels.simd import vectors
from specray.engine.kernels.team import Kernel, Team, as_pointer

_MAX_LANES = 16
_ROWS, _OUT, _NUM_ROWS, _WEIGHT, _SIZE, _EPS = range(6)
_NUM_ARGS = 6
_MIN_SHARED_SIZE = 65_536
"""Numbers below which a second thread costs more than it brings."""
_ONE = np.float32(1.0)


class FusedRMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); sums are float32.

    Args:
        weight: ``[size]``, bfloat16 or float32, as the rows will be.
    """

    __slots__ = ("_args", "_args_address", "_kernel", "_size", "_team", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float, team: Team) -> None:
        self._team = team
        self._size = weight.shape[0]
        self._weight = weight.contiguous()
        lanes = next(lanes for lanes in (_MAX_LANES, 8, 4, 2, 1) if self._size % lanes == 0)
        self._kernel = _norm_kernel(str(weight.dtype).removeprefix("torch."), lanes)
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[_WEIGHT], self._args[_SIZE] = self._weight.data_ptr(), self._size
        self._args.view(np.float32)[2 * _EPS] = eps
        self._args_address = self._args.ctypes.data

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, size]``, contiguous, to the same shape. Not for two threads at once."""
        out = self._team.empty(rows.shape, rows.dtype)
        args = self._args
        num_parts = self._team.size if rows.numel() >= _MIN_SHARED_SIZE else 1
        args[_ROWS], args[_OUT] = rows.data_ptr(), out.data_ptr()
        args[_NUM_ROWS] = rows.shape[0]
        self._team.run(self._kernel, self._args_address, num_parts)
        return out


@functools.cache
def _norm_kernel(dtype: str, lanes: int) -> Kernel:
    return Kernel(f"norm-{dtype}-{lanes}", _NUM_ARGS, lambda: _make_norm(dtype, lanes))


def _make_norm(dtype: str, lanes: int) -> Any:
    wide, stored = vectors(lanes), vectors(lanes, dtype)
    load, store = stored.load, stored.store
    splat, mul, fma, total = wide.splat, wide.mul, wide.fma, wide.sum
    zero = np.float32(0.0)

    def norm(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        eps = carray(as_pointer(address), (2 * _NUM_ARGS,), np.float32)[2 * _EPS]
        size, num_rows = args[_SIZE], args[_NUM_ROWS]
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            squares = splat(zero)
            for place in range(row * size, (row + 1) * size, lanes):
                numbers = load(args[_ROWS], place)
                squares = fma(numbers, numbers, squares)
            factor = splat(_ONE / np.sqrt(total(squares) / np.float32(size) + eps))
            for place in range(0, size, lanes):
                weighted = mul(mul(load(args[_ROWS], row * size + place), factor), load(args[_WEIGHT], place))
                store(args[_OUT], row * size + place, weighted)

    return norm
