"""Low-rank products on CPU: what adapters add to the sums of a linear layer, in float32.

A row of adapter ``slot`` gets ``up[slot] @ (down[slot] @ row)`` (LoRA: Hu et al., 2021). One job turns all
rows of a step down to their ranks, another up to the layer's outputs. Both read a plan of the step and a
table of the slots, so a recorded job goes on right when other rows, or other adapters, are in them. Sums are
float32 in a fixed order: a row's result does not depend on the other rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import Kernel, as_pointer

WIDTH = 16
"""Ranks of a panel of ``down``."""
PANEL = 32
"""Output features of a panel of ``up``."""
TILE = 4
"""Rows at once."""
(
    ROWS,
    STRIDE,
    SEGMENTS,
    ORDER,
    TABLE,
    TURNED,
    TURNED_STEP,
    IN_FEATURES,
    SCRATCH,
    SCRATCH_SIZE,
    OUT,
    OUT_STEP,
    NUM_PANELS,
) = range(13)
NUM_ARGS = 13
"""Arguments of both kernels. Addresses: of rows (``STRIDE`` bytes apart), of the plan's two parts, of the
table, of float32 turned rows and outputs (steps in numbers), of scratch memory (bytes for each thread).

Segments are int64 ``[1 + 3 * n]``: their number, then slot, first place and count of each; slot -1: none. The
order is that of rows by place, int64."""
DOWN, NUM_WIDTHS, UP, RANGES = range(4)
NUM_COLUMNS = 4
"""Columns of the table, int64, for each slot: address of ``down`` ``[NUM_WIDTHS, in_features, WIDTH]``, 0
where the layer is not adapted; their number; address of ``up``; and of int64 ``[panels, 3]``: for each panel
of outputs where in ``up`` its ``[count, PANEL]`` begin, the first of the ranks, and their number."""
_EMPTY = np.float32(-0.0)
"""What is added to sums that stay as they are, also to a zero."""


@functools.cache
def down_kernel(dtype: str) -> Kernel:
    """Turns rows down to their adapters' ranks, each at its place. Weights and rows have one data type."""
    return Kernel(f"low-rank-down-{dtype}", NUM_ARGS, functools.partial(_make_down, dtype))


@functools.cache
def up_kernel(dtype: str) -> Kernel:
    """Turns them up to all output features, each to its row; rows without adapters get nothing to add."""
    return Kernel(f"low-rank-up-{dtype}", NUM_ARGS, functools.partial(_make_up, dtype))


def _make_down(dtype: str) -> Any:
    multiply = _make_multiply(WIDTH, dtype)
    is_float = dtype == "float32"
    line, one = vectors(WIDTH, dtype), vectors(1, dtype)
    keep, keep_one = vectors(WIDTH).store, vectors(1).store
    load, load_one = line.load, one.load

    @kernel()
    def widen(row: int, floats: int, size: int) -> None:
        whole = size // WIDTH * WIDTH
        for at in range(0, whole, WIDTH):
            keep(floats, at, load(row, at))
        for at in range(whole, size):
            keep_one(floats, at, load_one(row, at))

    def turn_down(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        size, step = args[IN_FEATURES], args[TURNED_STEP]
        num_segments = carray(as_pointer(args[SEGMENTS]), (1,), np.int64)[0]
        segments = carray(as_pointer(args[SEGMENTS] + 8), (num_segments, 3), np.int64)
        floats, room = args[SCRATCH] + thread * args[SCRATCH_SIZE], 4 * size
        total = 0
        for number in range(num_segments):
            slot = segments[number, 0]
            if slot >= 0:
                own = carray(as_pointer(args[TABLE] + 8 * NUM_COLUMNS * slot), (NUM_COLUMNS,), np.int64)
                total += (segments[number, 2] + TILE - 1) // TILE * own[NUM_WIDTHS]
        begin, end, unit = total * part // num_parts, total * (part + 1) // num_parts, 0
        for number in range(num_segments):
            slot, first, count = segments[number, 0], segments[number, 1], segments[number, 2]
            if slot < 0:
                continue
            own = carray(as_pointer(args[TABLE] + 8 * NUM_COLUMNS * slot), (NUM_COLUMNS,), np.int64)
            order = carray(as_pointer(args[ORDER] + 8 * first), (count,), np.int64)
            for tile in range(0, count, TILE):
                lowest, highest = max(begin - unit, 0), min(end - unit, own[NUM_WIDTHS])
                unit += own[NUM_WIDTHS]
                if lowest >= highest:
                    continue
                num_rows = min(TILE, count - tile)
                if not is_float:
                    for row in range(num_rows):
                        widen(args[ROWS] + order[tile + row] * args[STRIDE], floats + row * room, size)
                for width in range(lowest, highest):
                    weight = own[DOWN] + width * size * WIDTH * (4 if is_float else 2)
                    for row in range(0, num_rows, 2):
                        is_pair = row + 1 < num_rows
                        here = floats + row * room
                        there = here + room
                        if is_float:
                            here = args[ROWS] + order[tile + row] * args[STRIDE]
                            there = args[ROWS] + order[tile + row + is_pair] * args[STRIDE]
                        place = args[TURNED] + 4 * ((first + tile + row) * step + width * WIDTH)
                        multiply(here, there, weight, size, is_pair, place, place + 4 * step)

    return turn_down


def _make_up(dtype: str) -> Any:
    multiply = _make_multiply(PANEL, dtype)
    item_size = 4 if dtype == "float32" else 2
    single = vectors(PANEL)
    store, splat = single.store, single.splat

    @kernel()
    def keep(args: Any, panel: int, first: int, count: int) -> None:
        order = carray(as_pointer(args[ORDER] + 8 * first), (count,), np.int64)
        for place in range(count):
            store(args[OUT], order[place] * args[OUT_STEP] + panel * PANEL, splat(_EMPTY))

    def turn_up(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        step, out_step, num_panels = args[TURNED_STEP], args[OUT_STEP], args[NUM_PANELS]
        num_segments = carray(as_pointer(args[SEGMENTS]), (1,), np.int64)[0]
        segments = carray(as_pointer(args[SEGMENTS] + 8), (num_segments, 3), np.int64)
        for panel in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            for number in range(num_segments):
                slot, first, count = segments[number, 0], segments[number, 1], segments[number, 2]
                if slot < 0:
                    keep(args, panel, first, count)
                    continue
                own = carray(as_pointer(args[TABLE] + 8 * NUM_COLUMNS * slot), (NUM_COLUMNS,), np.int64)
                if own[DOWN] == 0:
                    keep(args, panel, first, count)
                    continue
                ranks = carray(as_pointer(own[RANGES] + 24 * panel), (3,), np.int64)
                if ranks[2] == 0:
                    keep(args, panel, first, count)
                    continue
                order = carray(as_pointer(args[ORDER] + 8 * first), (count,), np.int64)
                weight = own[UP] + ranks[0] * item_size
                for row in range(0, count, 2):
                    is_pair = row + 1 < count
                    here = args[TURNED] + 4 * ((first + row) * step + ranks[1])
                    out, other = (
                        args[OUT] + 4 * (order[row] * out_step + panel * PANEL),
                        args[OUT] + 4 * (order[row + is_pair] * out_step + panel * PANEL),
                    )
                    multiply(here, here + 4 * step, weight, ranks[2], is_pair, out, other)

    return turn_up


def _make_multiply(lanes: int, dtype: str) -> Any:
    """Makes the product of one or two float32 rows with ``[size, lanes]`` weights, written to two places.

    Even and odd features have sums of their own, so that a product need not wait for the one before.
    """
    single, stored = vectors(lanes), vectors(lanes, dtype)
    load, store, splat, fma, add = stored.load, single.store, single.splat, single.fma, single.add
    zero = np.float32(0.0)

    @kernel()
    def multiply(
        row: int, other: int, weight: int, size: int, is_pair: bool, out: int, other_out: int
    ) -> None:
        numbers = carray(as_pointer(row), (size,), np.float32)
        even, odd = splat(zero), splat(zero)
        half = size // 2
        if not is_pair:
            for pair in range(half):
                even = fma(load(weight, 2 * pair * lanes), splat(numbers[2 * pair]), even)
                odd = fma(load(weight, (2 * pair + 1) * lanes), splat(numbers[2 * pair + 1]), odd)
            if size % 2:
                even = fma(load(weight, 2 * half * lanes), splat(numbers[2 * half]), even)
            store(out, 0, add(even, odd))
            return
        others = carray(as_pointer(other), (size,), np.float32)
        other_even, other_odd = splat(zero), splat(zero)
        for pair in range(half):
            weights = load(weight, 2 * pair * lanes)
            even = fma(weights, splat(numbers[2 * pair]), even)
            other_even = fma(weights, splat(others[2 * pair]), other_even)
            weights = load(weight, (2 * pair + 1) * lanes)
            odd = fma(weights, splat(numbers[2 * pair + 1]), odd)
            other_odd = fma(weights, splat(others[2 * pair + 1]), other_odd)
        if size % 2:
            weights = load(weight, 2 * half * lanes)
            even = fma(weights, splat(numbers[2 * half]), even)
            other_even = fma(weights, splat(others[2 * half]), other_even)
        store(out, 0, add(even, odd))
        store(other_out, 0, add(other_even, other_odd))

    return multiply
