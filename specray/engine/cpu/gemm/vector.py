"""AVX product of rows with a panel of weights, by bfloat16 or float32 multiplications.

A panel is 32 output features. In it, two input features of all 32 lie side by side, two registers wide, as
AVX-512's bfloat16 instruction takes them. The panel is streamed once for up to 14 rows, whose sums stay in 28
registers; for more rows, each piece of it is read again from L2. Weights are prefetched, so that memory works
during products. A core thus runs at memory speed up to about 12 rows, and near the instruction's peak from
there on. Sums are float32 in a fixed order, so a row's result does not depend on the other rows.

Float32 weights have a register for each feature of a pair. A bfloat16 is the upper half of a float32, so one
more instruction per register of weights converts it. AMD's
processors do two bfloat16 products in the time of one float32 product. Intel's issue the bfloat16 instruction
every other cycle on one port, and float32 products on two: there float32 is twice as fast (measured: 86
against 176 billion operations per second and core). Processors with AVX-512 or AVX2 alone use float32
products, too.

Blocking after Goto and van de Geijn: *Anatomy of high-performance matrix multiplication*, TOMS 2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
"""Input features of a block; weights have whole blocks."""
_HALVES = PANEL // 16
"""Halves of a panel, 16 output features each."""
_PAIRS_AT_ONCE = 2
"""Pairs of input features per iteration of the inner loop. With more, LLVM loads weights too early and
spills."""
CLOCK_BITS = 20
"""Fraction bits of the clock, which counts rows."""
BLOCKS_AT_ONCE = 8
"""Blocks of a panel at once, 16 KiB of bfloat16, when rows exceed one tile; for float32 rows always."""
FLOAT_STRIDE = BLOCKS_AT_ONCE * BLOCK * 4 + 64
"""Bytes between float32 rows of that many blocks. At a power of two, rows would evict each other from L1."""
_AHEAD = 8192
"""Prefetch distance in bytes: about 400 ns of streaming."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Register tiling: how sums fill the vector registers."""

    has_float_rows: bool
    """True if rows and products are float32; else they are bfloat16."""
    max_rows: int
    """Maximum rows of a tile."""
    passes: tuple[tuple[int, ...], ...]
    """Passes over a piece of a panel: the halves whose sums are in registers during each."""
    weight_bytes: int = 2
    """Bytes of a weight: 2 of bfloat16, or 4 of float32, which float32 rows multiply."""

    @property
    def pair_bytes(self) -> int:
        """Bytes of two input features of a panel."""
        return 2 * PANEL * self.weight_bytes

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.weight_bytes)


def block_bytes(weight_bytes: int) -> int:
    """Bytes of a panel's block of weights."""
    return PANEL * BLOCK * weight_bytes


AVX512_BF16 = Shape(has_float_rows=False, max_rows=14, passes=((0, 1),))
"""Tiling with sums in 28 of 32 registers of 16 float32."""
AVX512_FMA = Shape(has_float_rows=True, max_rows=13, passes=((0, 1),))
"""Tiling with one row less, since converted weights take registers, too."""
AVX2_FMA = Shape(has_float_rows=True, max_rows=6, passes=((0,), (1,)))
"""Tiling with sums in 12 of AVX2's 16 registers of 8 float32; the second pass reads weights from L1."""
AVX512_FLOAT = replace(AVX512_FMA, weight_bytes=4)
AVX2_FLOAT = replace(AVX2_FMA, weight_bytes=4)


def arrange(weight: torch.Tensor) -> torch.Tensor:
    """Rearranges ``[32 * panels, in_features]`` to ``[panels, in_features / 2, 32, 2]``.

    Float32 weights, which no instruction takes in pairs, to ``[panels, in_features, 32]``.
    """
    if weight.dtype == torch.float32:
        return weight.view(-1, PANEL, weight.shape[1]).permute(0, 2, 1)
    return weight.view(-1, PANEL, weight.shape[1] // 2, 2).permute(0, 2, 1, 3)


def multiply_kernel(shape: Shape, finish: Any) -> tuple[Any, Any, Any]:
    """Makes three functions that begin, do and end a thread's products.

    ``begin(num_rows)``: ``multiply`` may get some of these rows at a time.

    ``multiply(rows, steps, weight, sums, num_rows, num_blocks, blocks, end, then, due)`` adds ``rows @
    panel`` over blocks ``[blocks[0], blocks[1])`` to the sums; block 0 starts them. ``rows``, ``weight`` (the
    panel) and ``sums`` ``[num_rows, 32]`` are addresses; ``steps`` are bytes to the next row and to the next
    block of features; ``end`` is the address after the last weight that this thread will read soon.
    Meanwhile it may call ``finish(then, first, last)`` for rows of an earlier panel. ``due`` is a clock and
    its increment per product of 32 rows with a block, in ``1 << CLOCK_BITS``ths of a row. Returns the new
    clock.

    ``end()`` releases registers.
    """
    tile, has_float_rows, most = _make_tile(shape), shape.has_float_rows, shape.max_rows
    block_bytes, pair_bytes = shape.block_bytes, shape.pair_bytes
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
            piece = weight + block * block_bytes
            next_piece = piece + count * block_bytes
            for index in range(num_tiles):
                first, last = num_rows * index // num_tiles, num_rows * (index + 1) // num_tiles
                # Prefetching cached data is almost free.
                ahead, step = sums, 0
                if num_tiles == 1:
                    ahead, step = piece + _AHEAD, pair_bytes
                elif index < 2 and next_piece < end:
                    # The first two tiles prefetch one half each.
                    ahead, step = next_piece + index * count * block_bytes // 2, pair_bytes // 2
                place = rows + first * stride + block * shift
                tile(last - first, place, stride, piece, sums + first * PANEL * 4, count, ahead, step)
        # The caller has finished earlier rows: products and epilogue compete for the same units.
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
    """Makes ``(num_rows, rows, stride, weight, sums, num_blocks, ahead, step)``, which adds to the sums.

    ``rows``, ``weight``, ``sums`` and ``ahead`` are addresses, ``stride`` the bytes between rows
    (FLOAT_STRIDE for float32). Each pair of input features prefetches two lines at ``ahead``, which then
    moves by ``step`` bytes. Emitted as LLVM IR, so that sums stay in registers.
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
                _emit_tile(builder, shape, halves, count, *others)
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
    shape: Shape,
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
        turn_bytes = ir.Constant(_INT64, _PAIRS_AT_ONCE * shape.pair_bytes)
        turn = builder.add(weight, builder.mul(loop.index, turn_bytes))
        moved = builder.mul(loop.index, builder.mul(step, ir.Constant(_INT64, _PAIRS_AT_ONCE)))
        wanted = builder.add(ahead, moved)
        for pair in range(_PAIRS_AT_ONCE):
            # The lines of both features follow each other, or one line has both.
            lines = {
                (feature, half): (feature * _HALVES + half) * 64
                for feature in range(shape.weight_bytes // 2)
                for half in halves
            }
            words = {
                line: _load(builder, turn, pair * shape.pair_bytes + offset, _WORDS, 64)
                for line, offset in lines.items()
            }
            for offset in lines.values():
                call_prefetch(builder, builder.add(wanted, ir.Constant(_INT64, offset)))
            wanted = builder.add(wanted, step)
            if shape.has_float_rows:
                _emit_float_products(builder, totals, num_rows, rows, loop.index, words, pair)
            else:
                own = {half: word for (_, half), word in words.items()}
                _emit_pair_products(builder, totals, starts, loop.index, own, pair)
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
    """Emits bfloat16 products of all rows with one pair of input features, the iteration's ``pair``-th."""
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
    words: dict[tuple[int, int], Any],
    pair: int,
) -> None:
    """Emits the same as float32 products, one feature after the other.

    ``words`` are registers by feature and half: bfloat16 of two features, or float32 of each.
    """
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
    )
    # One address for all rows: there are not enough registers for one each.
    place = builder.add(rows, builder.mul(turn, ir.Constant(_INT64, _PAIRS_AT_ONCE * 8)))
    sixteen, high = ir.Constant(_WORDS, [16] * 16), ir.Constant(_WORDS, [-0x10000] * 16)
    for feature in range(2):
        if (1, 0) in words or (1, 1) in words:
            own = {half: word for (place_of, half), word in words.items() if place_of == feature}
        else:
            own = {
                half: builder.and_(word, high) if feature else builder.shl(word, sixteen)
                for (_, half), word in words.items()
            }
        weights = {half: builder.bitcast(word, _FLOATS) for half, word in own.items()}
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
