"""What is attended to times the sigmoid of a gate of its own, in one kernel."""

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
def gate_kernel(dtype: str, lanes: int) -> Kernel:
    return Kernel(f"row-gate-{dtype}-{lanes}", NUM_ARGS, lambda: _make_gate(dtype, lanes))


def _make_gate(dtype: str, lanes: int) -> Any:
    wide, stored = vectors(lanes), vectors(lanes, dtype)
    load, store = stored.load, stored.store
    splat, div, add, sub, larger, exp = wide.splat, wide.div, wide.add, wide.sub, wide.max, wide.exp
    zero, one, lowest = np.float32(0.0), np.float32(1.0), np.float32(-87.0)

    def gate(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        count = args[_NUM_NUMBERS] // lanes
        for index in range(count * part // num_parts, count * (part + 1) // num_parts):
            at = index * lanes
            inverse = add(splat(one), exp(sub(splat(zero), larger(load(args[_GATES], at), splat(lowest)))))
            store(args[_ROWS], at, div(load(args[_ROWS], at), inverse))

    return gate
