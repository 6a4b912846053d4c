"""Rows times a panel of weights, in vectors: by products of bfloat16, or of float32.

A panel is 32 output features; in a panel, two input features of all 32 lie side by side, two registers wide,
as AVX-512's bfloat16 products want them. It streams through once for up to 14 rows, whose 28 registers of
sums stay where they are; with more rows, each piece of it is read again from the second cache. What comes
next is asked for ahead of time, so that memory works while products are computed. Per core that is the speed
of memory up to some 12 rows and nearly that of the instruction from there on. Sums are float32 in one order,
so a row's result does not depend on the other rows, nor on their number.

A bfloat16 number is the first half of a float32, so one more instruction for each register of weights gives
what float32 products take. AMD's processors do two bfloat16 products in the time of one of float32, which is
what the instruction is for. Intel's do it every other cycle on one unit, and have two for float32: there
these are twice as fast (measured: 86 against 176 billion operations a second and core). Processors that have
no such instruction, with AVX-512 or AVX2 alone, have float32 products, too.

Blocking after Goto and van de Geijn: *Anatomy of high-performance matrix multiplication*, TOMS 2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.cpu.simd import call_prefetch, kernel, vectors

PANEL = 32
"""Output features of a panel."""
BLOCK = 32
"""Input features are a multiple of it."""
BLOCK_BYTES = PANEL * BLOCK * 2
_HALVES = PANEL // 16
"""Of a panel: 16 output features each."""
_PAIR_BYTES = PANEL * 4
_PAIRS_AT_ONCE = 2
"""Of a turn of the innermost loop. With more, LLVM loads weights so early that it runs out of registers."""
CLOCK_BITS = 20
"""Of a row's fractions."""
BLOCKS_AT_ONCE = 8
"""Of a panel with more rows than that: 16 KiB. Of float32 rows always."""
FLOAT_STRIDE = BLOCKS_AT_ONCE * BLOCK * 4 + 64
"""Bytes between float32 rows of so many blocks. With a power of two they would push each other out of the
first cache."""
_AHEAD = 8192
"""Bytes between what is multiplied and what is asked for: some 400 ns of streaming."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How sums fill the registers."""

    has_float_rows: bool
    """Rows are float32, and so are the products; else bfloat16."""
    max_rows: int
    """At once."""
    passes: tuple[tuple[int, ...], ...]
    """Over a piece of a panel: for which of its halves of 16 output features there are sums in each."""


BY_PAIRS = Shape(has_float_rows=False, max_rows=14, passes=((0, 1),))
"""28 of 32 registers of 16 numbers hold sums."""
BY_FLOATS = Shape(has_float_rows=True, max_rows=13, passes=((0, 1),))
"""One row less, as weights that were made float32 take registers, too."""
BY_SHORT_FLOATS = Shape(has_float_rows=True, max_rows=6, passes=((0,), (1,)))
"""12 of AVX2's 16 registers of 8 numbers; what the second pass reads is in the first cache."""


def arrange(weight: torch.Tensor) -> torch.Tensor:
    """``[32 * panels, in_features]`` to ``[panels, in_features / 2, 32, 2]``."""
    return weight.view(-1, PANEL, weight.shape[1] // 2, 2).permute(0, 2, 1, 3)


def multiply_kernel(shape: Shape, finish: Any) -> tuple[Any, Any, Any]:
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
    tile, has_float_rows, most = _make_tile(shape), shape.has_float_rows, shape.max_rows
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
        num_tiles = (num_rows + most - 1) // most
        blocks_at_once = num_blocks if num_tiles == 1 and not has_float_rows else BLOCKS_AT_ONCE
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


def _make_tile(shape: Shape) -> Any:
    """``(num_rows, rows, stride, weight, sums, num_blocks, ahead, step)``: adds a product to the sums.

    Addresses; ``stride`` in bytes between rows, which is FLOAT_STRIDE of float32. For each pair of input
    features two lines are asked for from ``ahead`` on, which moves by ``step`` bytes. Written as
    instructions: the sums must stay in registers.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *others = args
        end = builder.append_basic_block("end")
        switch = builder.switch(num_rows, end)
        for count in range(1, shape.max_rows + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(_INT64, count), block)
            builder.position_at_end(block)
            for halves in shape.passes:
                _emit_tile(builder, shape.has_float_rows, halves, count, *others)
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
    has_float_rows: bool,
    halves: Sequence[int],
    num_rows: int,
    rows: Any,
    stride: Any,
    weight: Any,
    sums: Any,
    num_blocks: Any,
    ahead: Any,
    step: Any,
) -> None:
    offsets = {(row, half): (row * _HALVES + half) * 64 for row in range(num_rows) for half in halves}
    totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in offsets}
    for place, offset in offsets.items():
        builder.store(_load(builder, sums, offset, _FLOATS, 4), totals[place])
    starts = [builder.add(rows, builder.mul(stride, ir.Constant(_INT64, row))) for row in range(num_rows)]
    num_turns = builder.mul(num_blocks, ir.Constant(_INT64, BLOCK // 2 // _PAIRS_AT_ONCE))
    with cgutils.for_range(builder, num_turns, intp=_INT64) as loop:
        turn = builder.add(weight, builder.mul(loop.index, ir.Constant(_INT64, _PAIRS_AT_ONCE * _PAIR_BYTES)))
        moved = builder.mul(loop.index, builder.mul(step, ir.Constant(_INT64, _PAIRS_AT_ONCE)))
        wanted = builder.add(ahead, moved)
        for pair in range(_PAIRS_AT_ONCE):
            words = {
                half: _load(builder, turn, pair * _PAIR_BYTES + half * 64, _WORDS, 64) for half in halves
            }
            for half in halves:
                call_prefetch(builder, builder.add(wanted, ir.Constant(_INT64, half * 64)))
            wanted = builder.add(wanted, step)
            if has_float_rows:
                _emit_float_products(builder, totals, num_rows, rows, loop.index, words, pair)
            else:
                _emit_pair_products(builder, totals, starts, loop.index, words, pair)
    for place, offset in offsets.items():
        pointer = builder.inttoptr(builder.add(sums, ir.Constant(_INT64, offset)), _FLOATS.as_pointer())
        builder.store(builder.load(totals[place]), pointer).align = 4


def _emit_pair_products(
    builder: Any,
    totals: dict[tuple[int, int], Any],
    starts: list[Any],
    turn: Any,
    words: dict[int, Any],
    pair: int,
) -> None:
    """Of all rows with a pair of input features, the turn's ``pair``-th, by bfloat16 products."""
    product = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    shift = builder.mul(turn, ir.Constant(_INT64, _PAIRS_AT_ONCE * 4))
    weights = {half: builder.bitcast(word, _PAIRS) for half, word in words.items()}
    for row, start in enumerate(starts):
        number = _load(builder, builder.add(start, shift), pair * 4, _INT32, 4)
        operand = builder.bitcast(_splat(builder, number, _WORDS), _PAIRS)
        for half, weight in weights.items():
            total = totals[row, half]
            builder.store(builder.call(product, [builder.load(total), operand, weight]), total)


def _emit_float_products(
    builder: Any,
    totals: dict[tuple[int, int], Any],
    num_rows: int,
    rows: Any,
    turn: Any,
    words: dict[int, Any],
    pair: int,
) -> None:
    """The same by float32 products, one feature after the other."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
    )
    # One address for all rows: there are not registers enough for one of each.
    place = builder.add(rows, builder.mul(turn, ir.Constant(_INT64, _PAIRS_AT_ONCE * 8)))
    sixteen, high = ir.Constant(_WORDS, [16] * 16), ir.Constant(_WORDS, [-0x10000] * 16)
    for feature in range(2):
        weights = {
            half: builder.bitcast(
                builder.and_(word, high) if feature else builder.shl(word, sixteen), _FLOATS
            )
            for half, word in words.items()
        }
        for row in range(num_rows):
            number = _load(builder, place, row * FLOAT_STRIDE + pair * 8 + feature * 4, ir.FloatType(), 4)
            operand = _splat(builder, number, _FLOATS)
            for half, weight in weights.items():
                total = totals[row, half]
                builder.store(builder.call(fma, [operand, weight, builder.load(total)]), total)


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * 16))


def _load(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    pointer = builder.inttoptr(builder.add(address, ir.Constant(_INT64, offset)), kind.as_pointer())
    value = builder.load(pointer)
    value.align = align
    return value
