"""Open rows of a layer that is a short convolution with two gates, in one kernel.

Rows are ``[B | C | x]``: B times x is kept and convolved, C is a factor of what comes out. A thread has some
channels of a sequence. Every row is computed by the same instructions, whatever rows are next to it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.simd import vectors
from specray.engine.cpu.thread_pool import Kernel, as_pointer
from specray.engine.step import FIRST_ROW, NUM_COLUMNS, NUM_OPEN, SETTLED, SLOT, START

ROWS, OUT, TAPS, BIAS, INPUTS, TABLE, NUM_SEQUENCES, CHANNELS, MAX_OPEN = range(9)
NUM_ARGS = 9
_RUN = 512
"""Channels that a thread takes at once."""


@functools.cache
def convolution_kernel(dtype: str, num_taps: int, lanes: int) -> Kernel:
    """``lanes`` divides the number of channels."""
    name = f"short-convolution-{dtype}-{num_taps}-{lanes}"
    return Kernel(name, NUM_ARGS, lambda: _make_convolution(dtype, num_taps, lanes))


def _make_convolution(dtype: str, num_taps: int, lanes: int) -> Any:
    wide, stored = vectors(lanes), vectors(lanes, dtype)
    load, store, fetch, mul, fma = stored.load, stored.store, wide.load, wide.mul, wide.fma

    def convolution(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        num_sequences, channels = args[NUM_SEQUENCES], args[CHANNELS]
        table = carray(as_pointer(args[TABLE]), (num_sequences * NUM_COLUMNS,), np.int32)
        rows, inputs, ring = args[ROWS], args[INPUTS], args[MAX_OPEN] + num_taps - 1
        num_runs = -(-channels // _RUN)
        for item in range(part, num_sequences * num_runs, num_parts):
            at = item // num_runs * NUM_COLUMNS
            slot, first, count = table[at + SLOT], table[at + FIRST_ROW], table[at + NUM_OPEN]
            opened = max(table[at + START], table[at + SETTLED])
            begin = item % num_runs * _RUN
            end, ring_at = min(channels, begin + _RUN), slot * ring * channels
            for index in range(count):
                here, there = (first + index) * 3 * channels, ring_at + (opened + index) % ring * channels
                for channel in range(begin, end, lanes):
                    product = mul(load(rows, here + channel), load(rows, here + 2 * channels + channel))
                    store(inputs, there + channel, product)
            for index in range(count):
                oldest, row = opened + index - num_taps + 1, first + index
                for channel in range(begin, end, lanes):
                    total = fetch(args[BIAS], channel)
                    for tap in range(max(0, -oldest), num_taps):
                        known = load(inputs, ring_at + (oldest + tap) % ring * channels + channel)
                        total = fma(known, fetch(args[TAPS], tap * channels + channel), total)
                    factor = load(rows, row * 3 * channels + channels + channel)
                    store(args[OUT], row * channels + channel, mul(factor, total))

    return convolution
