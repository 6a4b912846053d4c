"""Kernels that change each number of rows where it is: by the sigmoid of a gate, or to a square."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.simd import vectors
from specray.engine.cpu.thread_pool import Kernel, as_pointer

_GATES, _ROWS, _NUM_NUMBERS = range(3)
NUM_ARGS = 3


@functools.cache
def gate_kernel(dtype: str, lanes: int, width: int = 1) -> Kernel:
    """Each gate is of ``width`` numbers; ``lanes`` divides these, or the gates where each has one."""
    return Kernel(f"row-gate-{dtype}-{lanes}-{width}", NUM_ARGS, lambda: _make_gate(dtype, lanes, width))


@functools.cache
def square_kernel(dtype: str, lanes: int) -> Kernel:
    """The square of what is above zero."""
    return Kernel(f"square-{dtype}-{lanes}", NUM_ARGS, lambda: _make_square(dtype, lanes))


def _make_square(dtype: str, lanes: int) -> Any:
    wide, stored = vectors(lanes), vectors(lanes, dtype)
    load, store, splat, mul, larger = stored.load, stored.store, wide.splat, wide.mul, wide.max
    zero = np.float32(0.0)

    def square(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        count = args[_NUM_NUMBERS] // lanes
        for index in range(count * part // num_parts, count * (part + 1) // num_parts):
            number = larger(load(args[_ROWS], index * lanes), splat(zero))
            store(args[_ROWS], index * lanes, mul(number, number))

    return square


def _make_gate(dtype: str, lanes: int, width: int) -> Any:
    wide, stored = vectors(lanes), vectors(lanes, dtype)
    load, store, load_one, total_one = stored.load, stored.store, vectors(1, dtype).load, vectors(1).sum
    splat, div, add, sub, larger, exp = wide.splat, wide.div, wide.add, wide.sub, wide.max, wide.exp
    zero, one, lowest = np.float32(0.0), np.float32(1.0), np.float32(-87.0)

    def gate(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        count = args[_NUM_NUMBERS] // lanes
        for index in range(count * part // num_parts, count * (part + 1) // num_parts):
            at = index * lanes
            if width == 1:
                chosen = load(args[_GATES], at)
            else:
                chosen = splat(total_one(load_one(args[_GATES], at // width)))
            inverse = add(splat(one), exp(sub(splat(zero), larger(chosen, splat(lowest)))))
            store(args[_ROWS], at, div(load(args[_ROWS], at), inverse))

    return gate
