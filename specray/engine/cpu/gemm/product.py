"""The kernel of linear layers with bfloat16 weights: its arguments, and its split over threads.

A part is some panels. A thread multiplies a panel and runs its epilogue; with AMX and many rows, it does so
while it multiplies the next panel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from specray.engine.activation import Activation, Joint, joint_name
from specray.engine.cpu.gemm import amx, vector
from specray.engine.cpu.gemm.epilogue import GATED, epilogue_kernel
from specray.engine.cpu.gemm.rows import HEIGHT, row_place
from specray.engine.cpu.gemm.vector import (
    BLOCK,
    BLOCKS_AT_ONCE,
    CLOCK_BITS,
    FLOAT_STRIDE,
    PANEL,
    block_bytes,
)
from specray.engine.cpu.isa import Isa
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import Kernel, as_pointer

(
    ROWS,
    STRIDE,
    SHIFT,
    NUM_ROWS,
    ROWS_AT_ONCE,
    OUT,
    OUT_STEP,
    OUT_BLOCK_STEP,
    IS_FLOAT,
    SUMMAND,
    SCRATCH,
    SCRATCH_SIZE,
    PANELS_AT_ONCE,
    NUM_BLOCKS_AT_ONCE,
    SUMS_STEP,
    NUM_SUMS,
    WEIGHT,
    BIAS,
    NUM_BLOCKS,
    SIZE,
    KIND,
    FLOAT_ROWS,
    DELTA,
    DELTA_STEP,
    GATE_DELTA,
) = range(25)
NUM_ARGS = 25


@functools.cache
def linear_kernel(isa: Isa, joint: Joint, dtype: str = "bfloat16", *, has_delta: bool = False) -> Kernel:
    """The kernel for a processor, with what joins gated layers; takes ``NUM_ARGS`` arguments.

    Args:
        dtype: of weights and rows, ``bfloat16`` or ``float32``.
        has_delta: see ``epilogue_kernel``.
    """
    suffix = "-delta" if has_delta else ""
    if dtype == "float32":
        shape = vector.AVX2_FLOAT if isa is Isa.AVX2_FMA else vector.AVX512_FLOAT
        made = functools.partial(
            _make_linear,
            functools.partial(vector.multiply_kernel, shape),
            joint,
            has_tiles=False,
            has_float_rows=True,
            item_size=4,
            has_delta=has_delta,
        )
        return Kernel(f"linear-float32-{shape.max_rows}-{joint_name(joint)}{suffix}", NUM_ARGS, made)
    makers: dict[Isa, Callable[[Any], Any]] = {
        Isa.AMX: amx.multiply_kernel,
        Isa.AVX512_BF16: functools.partial(vector.multiply_kernel, vector.AVX512_BF16),
        Isa.AVX512_FMA: functools.partial(vector.multiply_kernel, vector.AVX512_FMA),
        Isa.AVX2_FMA: functools.partial(vector.multiply_kernel, vector.AVX2_FMA),
    }
    name = f"linear-{isa}" if joint is Activation.SILU else f"linear-{isa}-{joint_name(joint)}"
    made = functools.partial(
        _make_linear,
        makers[isa],
        joint,
        has_tiles=isa is Isa.AMX,
        has_float_rows=isa.has_float_rows,
        item_size=2,
        has_delta=has_delta,
    )
    return Kernel(f"{name}{suffix}", NUM_ARGS, made)


def _make_linear(
    make_multiply: Callable[[Any], Any],
    joint: Joint,
    *,
    has_tiles: bool,
    has_float_rows: bool,
    item_size: int,
    has_delta: bool,
) -> Any:
    weight_block = block_bytes(item_size)
    finish = epilogue_kernel(joint, has_delta=has_delta)
    begin, multiply, finish_all = make_multiply(finish)
    load_row = vectors(BLOCK, "bfloat16" if item_size == 2 else "float32").load
    store = vectors(BLOCK, "float32").store

    @kernel()
    def place_rows(args: Any, floats: int, rows: tuple[int, int], blocks: tuple[int, int]) -> Any:
        """Prepares some rows for products; returns (address of block 0, (bytes to next row, next block))."""
        # Right for packed rows too: groups before this one are full.
        place = args[ROWS] + rows[0] * args[NUM_BLOCKS] * BLOCK * item_size
        if not has_float_rows:
            return place, (args[STRIDE], args[SHIFT])
        shift = rows[1] * (FLOAT_STRIDE // BLOCKS_AT_ONCE)
        for first in range(blocks[0], blocks[1], BLOCKS_AT_ONCE):
            piece = floats + (first - blocks[0]) * shift
            for row in range(rows[1]):
                for block in range(first, min(blocks[1], first + BLOCKS_AT_ONCE)):
                    numbers = load_row(place + row * args[STRIDE], block * BLOCK)
                    store(piece + row * FLOAT_STRIDE, (block - first) * BLOCK, numbers)
        return floats - blocks[0] * shift, (FLOAT_STRIDE, shift)

    @kernel()
    def epilogue(args: Any, sums: int, panel: int, first_row: int, num_rows: int) -> Any:
        """Epilogue of some rows of a panel, whose sums are complete."""
        kind, is_float, size = args[KIND], args[IS_FLOAT], args[SIZE]
        at = row_place(first_row, size, args[OUT_STEP]) + panel * args[OUT_BLOCK_STEP]
        bias, gate = args[BIAS] + panel * PANEL * 4, 0
        if kind == GATED:
            bias, gate = bias + (panel + 1) * PANEL * 4, args[ROWS_AT_ONCE] * PANEL * 4
        out, summand = args[OUT] + at * (4 if is_float else 2), args[SUMMAND] + at * item_size
        # Groups of rows have one size in both layouts.
        steps, shape = (args[OUT_STEP], HEIGHT * size), (num_rows, min(PANEL, size - panel * PANEL))
        delta = args[DELTA] + first_row * args[DELTA_STEP] + panel * PANEL * 4
        deltas = delta, args[DELTA_STEP], args[GATE_DELTA]
        return kind, is_float, sums + gate, bias, out, summand, gate, steps, deltas, shape

    @kernel()
    def do_panel(
        args: Any,
        sums: int,
        panel: int,
        num_rows: int,
        places: tuple[int, tuple[int, int]],
        blocks: tuple[int, int],
        end: int,
        waiting: Any,
    ) -> None:
        """Multiplies some rows and blocks of a panel: sums of the gate first, then of ``up``.

        Finishes all rows of the waiting panel meanwhile, spread evenly over the products.
        """
        num_blocks, num_layers = args[NUM_BLOCKS], 2 if args[KIND] == GATED else 1
        place, steps = places
        num_products = num_layers * ((num_rows + HEIGHT - 1) // HEIGHT) * (blocks[1] - blocks[0])
        clock, pace = 0, ((waiting[-1][0] << CLOCK_BITS) + num_products - 1) // num_products
        for layer in range(num_layers):
            weight = args[WEIGHT] + (panel * num_layers + layer) * num_blocks * weight_block
            total, due = sums + layer * args[ROWS_AT_ONCE] * PANEL * 4, (clock, pace)
            clock = multiply(place, steps, weight, total, num_rows, num_blocks, blocks, end, waiting, due)

    def linear(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        num_rows, num_blocks = args[NUM_ROWS], args[NUM_BLOCKS]
        rows_at_once, blocks_at_once = args[ROWS_AT_ONCE], args[NUM_BLOCKS_AT_ONCE]
        num_panels = (args[SIZE] + PANEL - 1) // PANEL
        first_panel, last_panel = num_panels * part // num_parts, num_panels * (part + 1) // num_parts
        num_layers = 2 if args[KIND] == GATED else 1
        end = args[WEIGHT] + last_panel * num_layers * num_blocks * weight_block
        first_sums = sums = args[SCRATCH] + thread * args[SCRATCH_SIZE]
        floats = first_sums + args[FLOAT_ROWS]
        waiting = epilogue(args, sums, first_panel, 0, 0)
        begin(num_rows)
        for group in range(first_panel, last_panel, args[PANELS_AT_ONCE]):
            last = min(last_panel, group + args[PANELS_AT_ONCE])
            for first_row in range(0, num_rows, rows_at_once):
                rows = first_row, min(num_rows - first_row, rows_at_once)
                for block in range(0, num_blocks, blocks_at_once):
                    blocks = block, min(num_blocks, block + blocks_at_once)
                    places = place_rows(args, floats, rows, blocks)
                    for panel in range(group, last):
                        place = first_sums + (panel - group) % args[NUM_SUMS] * args[SUMS_STEP]
                        if place == sums or not has_tiles:
                            # The sums' memory is needed now, or there is nothing to overlap with.
                            finish(waiting, 0, num_rows)
                            waiting = epilogue(args, place, panel, 0, 0)
                        do_panel(args, place, panel, rows[1], places, blocks, end, waiting)
                        num_done = rows[1] if blocks[1] == num_blocks else 0
                        sums, waiting = place, epilogue(args, place, panel, first_row, num_done)
        finish(waiting, 0, num_rows)
        finish_all()

    return linear
