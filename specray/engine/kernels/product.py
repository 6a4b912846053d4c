"""Rows times a panel of weights, with AVX-512's own bfloat16 products.

A panel is 32 output features; in a panel, two input features of all 32 lie side by side, two registers wide,
as the instruction wants them. It streams through once for up to 14 rows, whose 28 registers of sums stay
where they are; with more rows, each piece of it is read again from the second cache. What comes next is asked
for ahead of time, so that memory works while products are computed. Per core that is the speed of memory up
to some 12 rows and nearly that of the instruction from there on. Sums are float32 in one order, so a row's
result does not depend on the other rows, nor on their number.

Blocking after Goto and van de Geijn: *Anatomy of high-performance matrix multiplication*, TOMS 2008.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.kernels.simd import call_prefetch, kernel, vectors

PANEL = 32
"""Output features of a panel."""
BLOCK = 32
"""Input features are a multiple of it."""
BLOCK_BYTES = PANEL * BLOCK * 2
_REGISTERS = PANEL // 16
_PAIR_BYTES = PANEL * 4
_PAIRS_AT_ONCE = 2
"""Of a turn of the innermost loop. With more, LLVM loads weights so early that it runs out of registers."""
_MAX_ROWS_AT_ONCE = 14
CLOCK_BITS = 20
"""Of a row's fractions."""
_BLOCKS_AT_ONCE = 8
"""Of a panel with more rows than that: 16 KiB."""
_AHEAD = 8192
"""Bytes between what is multiplied and what is asked for: some 400 ns of streaming."""


def arrange(weight: torch.Tensor) -> torch.Tensor:
    """``[32 * panels, in_features]`` to ``[panels, in_features / 2, 32, 2]``."""
    return weight.view(-1, PANEL, weight.shape[1] // 2, 2).permute(0, 2, 1, 3)


def multiply_kernel(finish: Any) -> tuple[Any, Any, Any]:
    """Three functions: what begins, does and ends a thread's products.

    ``(num_rows)``: for so many, of which ``multiply`` may get some at a time.

    ``(rows, steps, weight, sums, num_rows, num_blocks, blocks, end, then, due)``: the sums become
    ``rows @ panel`` of the blocks from the first to before the second number, added to the sums of those
    before. Addresses of rows, of the panel and of sums ``[num_rows, 32]``; bytes from row to row and from
    block to block of features (here they follow each other); ``end`` is behind the last weight that this
    thread will read soon. Meanwhile ``finish(then, first, last)`` may be called for rows of a panel before;
    ``due`` says for which: a clock's time and by how much it moves with 32 rows' product of a block, in
    ``1 << CLOCK_BITS``ths of a row. The clock's new time is returned.

    ``()``.
    """
    tile = _make_tile()
    line = vectors(PANEL, "float32")
    store, splat, zero = line.store, line.splat, np.float32(0.0)

    @kernel()
    def begin(num_rows: int) -> None:
        pass

    @kernel()
    def multiply(
        rows: int,
        steps: tuple[int, int],
        weight: int,
        sums: int,
        num_rows: int,
        num_blocks: int,
        blocks: tuple[int, int],
        end: int,
        then: Any,
        due: tuple[int, int],
    ) -> int:
        stride, shift = steps
        if blocks[0] == 0:
            for row in range(num_rows):
                store(sums, row * PANEL, splat(zero))
        num_tiles = (num_rows + _MAX_ROWS_AT_ONCE - 1) // _MAX_ROWS_AT_ONCE
        blocks_at_once = num_blocks if num_tiles == 1 else _BLOCKS_AT_ONCE
        for block in range(blocks[0], blocks[1], blocks_at_once):
            count = min(blocks_at_once, blocks[1] - block)
            piece = weight + block * BLOCK_BYTES
            next_piece = piece + count * BLOCK_BYTES
            for index in range(num_tiles):
                first, last = num_rows * index // num_tiles, num_rows * (index + 1) // num_tiles
                # Asking for what is at hand costs next to nothing.
                ahead, step = sums, 0
                if num_tiles == 1:
                    ahead, step = piece + _AHEAD, _PAIR_BYTES
                elif index < 2 and next_piece < end:
                    # The first two tiles ask for one half each.
                    ahead, step = next_piece + index * count * BLOCK_BYTES // 2, _PAIR_BYTES // 2
                place = rows + first * stride + block * shift
                tile(last - first, place, stride, piece, sums + first * PANEL * 4, count, ahead, step)
        # Rows are finished before, all at once: both want the same units.
        return due[0]

    @kernel()
    def end() -> None:
        pass

    return begin, multiply, end


class _BFloat16(ir.Type):
    """The element type of the instruction's operands, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS, _PAIRS = (
    ir.VectorType(ir.FloatType(), 16),
    ir.VectorType(_INT32, 16),
    ir.VectorType(_BFloat16(), 32),
)


def _make_tile() -> Any:
    """``(num_rows, rows, stride, weight, sums, num_blocks, ahead, step)``: adds a product to the sums.

    Addresses; ``stride`` in bytes between rows. For each pair of input features two lines are asked for from
    ``ahead`` on, which moves by ``step`` bytes. Written as instructions: the sums must stay in registers.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *others = args
        end = builder.append_basic_block("end")
        switch = builder.switch(num_rows, end)
        for count in range(1, _MAX_ROWS_AT_ONCE + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(_INT64, count), block)
            builder.position_at_end(block)
            _emit_tile(builder, count, *others)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def tile(
        context: Any,
        num_rows: Any,
        rows: Any,
        stride: Any,
        weight: Any,
        sums: Any,
        num_blocks: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), code

    return intrinsic(tile)


def _emit_tile(
    builder: Any,
    num_rows: int,
    rows: Any,
    stride: Any,
    weight: Any,
    sums: Any,
    num_blocks: Any,
    ahead: Any,
    step: Any,
) -> None:
    product = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    places = [(row, register) for row in range(num_rows) for register in range(_REGISTERS)]
    totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
    for row, register in places:
        builder.store(
            _load(builder, sums, (row * _REGISTERS + register) * 64, _FLOATS, 4), totals[row, register]
        )
    starts = [builder.add(rows, builder.mul(stride, ir.Constant(_INT64, row))) for row in range(num_rows)]
    num_turns = builder.mul(num_blocks, ir.Constant(_INT64, BLOCK // 2 // _PAIRS_AT_ONCE))
    with cgutils.for_range(builder, num_turns, intp=_INT64) as loop:
        turn = builder.add(weight, builder.mul(loop.index, ir.Constant(_INT64, _PAIRS_AT_ONCE * _PAIR_BYTES)))
        shift = builder.mul(loop.index, ir.Constant(_INT64, _PAIRS_AT_ONCE * 4))
        moved = builder.mul(loop.index, builder.mul(step, ir.Constant(_INT64, _PAIRS_AT_ONCE)))
        wanted = builder.add(ahead, moved)
        for pair in range(_PAIRS_AT_ONCE):
            weights = [
                _load(builder, turn, pair * _PAIR_BYTES + register * 64, _PAIRS, 64)
                for register in range(_REGISTERS)
            ]
            for register in range(_REGISTERS):
                call_prefetch(builder, builder.add(wanted, ir.Constant(_INT64, register * 64)))
            wanted = builder.add(wanted, step)
            for row in range(num_rows):
                number = _load(builder, builder.add(starts[row], shift), pair * 4, _INT32, 4)
                undefined = ir.Constant(_WORDS, ir.Undefined)
                first = builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
                everywhere = builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * 16))
                operand = builder.bitcast(everywhere, _PAIRS)
                for register in range(_REGISTERS):
                    total = totals[row, register]
                    builder.store(
                        builder.call(product, [builder.load(total), operand, weights[register]]), total
                    )
    for row, register in places:
        offset = ir.Constant(_INT64, (row * _REGISTERS + register) * 64)
        pointer = builder.inttoptr(builder.add(sums, offset), _FLOATS.as_pointer())
        builder.store(builder.load(totals[row, register]), pointer).align = 4


def _load(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    pointer = builder.inttoptr(builder.add(address, ir.Constant(_INT64, offset)), kind.as_pointer())
    value = builder.load(pointer)
    value.align = align
    return value
