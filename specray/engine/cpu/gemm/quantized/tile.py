"""AVX2 product of integer rows with a panel of quantised weights, emitted as LLVM IR.

Codes become pairs of 16-bit integers in registers, by a shift and a mask, and one instruction multiplies a
pair with a row's pair and adds both products: exact integers, 8 output features at a time. After a group the
sums are scaled and added to float32 totals in memory. Each total is added to in the order of the groups,
whatever the number of rows, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.cpu.gemm.quantized.integer_rows import BLOCK_BYTES, FACTOR_BYTES
from specray.engine.cpu.gemm.quantized.layout import Layout
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import call_prefetch
from specray.engine.weights.quantization import Quantization

MAX_ROWS = 6
"""Maximum rows of a tile: with 16 output features, their sums fill 12 of AVX2's 16 registers."""
_LANES = 8
_NUM_VECTORS = PANEL // _LANES
"""Vectors of a panel's output features."""
_LINE = 64
_FEW_ROWS = 1
"""Rows up to which all of a panel's vectors are summed in one pass; with more, half of them."""

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT16, _INT32, _INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS, _HALVES = (ir.VectorType(kind, _LANES) for kind in (_FLOAT, _INT32, _HALF))
_PAIRS = ir.VectorType(_INT16, 2 * _LANES)


def make_tile(layout: Layout) -> Any:
    """Makes ``(num_rows, integers, factors, all_rows, weight, sums, num_groups, ahead, step)``.

    It adds the product of up to ``MAX_ROWS`` integer rows with some groups of a panel to ``sums``, float32
    ``[num_rows, 32]``. ``integers``, ``factors``, ``weight`` and ``sums`` are addresses of the first row's
    first of these groups; ``all_rows`` is the number of rows between blocks. Each group prefetches its size
    at ``ahead``, which then moves by ``step`` bytes.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *others = args
        end = builder.append_basic_block("end")
        switch = builder.switch(num_rows, end)
        for count in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(_INT64, count), block)
            builder.position_at_end(block)
            width = _NUM_VECTORS if count <= _FEW_ROWS else _NUM_VECTORS // 2
            for first in range(0, _NUM_VECTORS, width):
                _Tile(builder, layout, count, range(first, first + width)).emit(*others)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def tile(
        context: Any,
        num_rows: Any,
        integers: Any,
        factors: Any,
        all_rows: Any,
        weight: Any,
        sums: Any,
        num_groups: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), code

    return intrinsic(tile)


class _Tile:
    """Emits the product for one number of rows and some vectors of the panel."""

    def __init__(self, builder: Any, layout: Layout, num_rows: int, vectors: range) -> None:
        self._builder, self._layout = builder, layout
        self._rows, self._vectors = range(num_rows), vectors
        self._places = [(row, vector) for row in self._rows for vector in vectors]
        self._sums = {place: cgutils.alloca_once(builder, _WORDS) for place in self._places}

    def emit(
        self,
        integers: Any,
        factors: Any,
        all_rows: Any,
        weight: Any,
        sums: Any,
        num_groups: Any,
        ahead: Any,
        step: Any,
    ) -> None:
        builder, layout = self._builder, self._layout
        with cgutils.for_range(builder, num_groups, intp=_INT64) as loop:
            group = builder.add(weight, self._times(loop.index, layout.group_bytes))
            row = builder.mul(loop.index, all_rows)
            block = builder.add(integers, self._times(row, BLOCK_BYTES))
            factor = builder.add(factors, self._times(row, FACTOR_BYTES))
            wanted = builder.add(ahead, builder.mul(loop.index, step))
            if self._vectors.start == 0:
                for line in range(layout.num_words * PANEL * 4 // _LINE, layout.group_bytes // _LINE):
                    self._prefetch(wanted, line)
            for place in self._places:
                builder.store(ir.Constant(_WORDS, [0] * _LANES), self._sums[place])
            with cgutils.for_range(builder, ir.Constant(_INT64, layout.num_words), intp=_INT64) as inner:
                self._emit_words(
                    builder.add(group, self._times(inner.index, PANEL * 4)),
                    builder.add(block, self._times(inner.index, 2 * layout.codes_per_word)),
                    builder.add(wanted, self._times(inner.index, PANEL * 4)),
                )
            self._emit_totals(builder.add(group, ir.Constant(_INT64, layout.scales_offset)), factor, sums)

    def _emit_words(self, words: Any, block: Any, wanted: Any) -> None:
        """Products with one word of each output feature."""
        builder = self._builder
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORDS, [_PAIRS, _PAIRS]), "llvm.x86.avx2.pmadd.wd"
        )
        if self._vectors.start == 0:
            for line in range(PANEL * 4 // _LINE):
                self._prefetch(wanted, line)
        for pair in range(self._layout.codes_per_word // 2):
            if len(self._rows) > _FEW_ROWS:
                self._emit_barrier()
            weights = {
                vector: self._unpacked(self._load(words, vector * _LANES * 4, _WORDS, 32), pair)
                for vector in self._vectors
            }
            for row in self._rows:
                number = self._load(block, row * BLOCK_BYTES + pair * 4, _INT32, 4)
                operand = builder.bitcast(self._splat(number, _WORDS), _PAIRS)
                for vector, weight in weights.items():
                    total = self._sums[row, vector]
                    product = builder.call(multiply, [operand, weight])
                    builder.store(self._kept(builder.add(builder.load(total), product)), total)

    def _emit_barrier(self) -> None:
        """Keeps LLVM from loading the next pairs' numbers early, for which there are no registers."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self._builder.asm(kind, "", "~{memory}", [], side_effect=True)

    def _kept(self, sums: Any) -> Any:
        """The sums as they are, in a register. Else LLVM adds several products first, and keeps them all."""
        kind = ir.FunctionType(_WORDS, [_WORDS])
        return self._builder.asm(kind, "", "=x,0", [sums], side_effect=False)

    def _unpacked(self, words: Any, pair: int) -> Any:
        """The codes of a pair of input features, as 16-bit integers."""
        builder = self._builder
        if self._layout.format is Quantization.INT8:
            halves, eight = builder.bitcast(words, _PAIRS), ir.Constant(_PAIRS, [8] * 2 * _LANES)
            return builder.ashr(halves if pair else builder.shl(halves, eight), eight)
        if pair:
            words = builder.lshr(words, ir.Constant(_WORDS, [4 * pair] * _LANES))
        mask = ir.Constant(_WORDS, [0x000F_000F] * _LANES)
        return builder.bitcast(builder.and_(words, mask), _PAIRS)

    def _emit_totals(self, numbers: Any, factor: Any, sums: Any) -> None:
        """Adds a group's sums to the totals: ``unit * sum * scale``, and before it ``unit * sum of integers *
        minimum``."""
        builder = self._builder
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{_LANES}f32"
        )
        scales = [self._load_halves(numbers, vector * _LANES * 2) for vector in self._vectors]
        minimums: list[Any] = []
        if self._layout.has_minimums:
            minimums = [self._load_halves(numbers, (PANEL + vector * _LANES) * 2) for vector in self._vectors]
        for row in self._rows:
            unit, unit_sum = (
                self._splat(self._load(factor, row * FACTOR_BYTES + offset, _FLOAT, 4), _FLOATS)
                for offset in (0, 4)
            )
            for index, vector in enumerate(self._vectors):
                offset = (row * PANEL + vector * _LANES) * 4
                total = self._load(sums, offset, _FLOATS, 4)
                if minimums:
                    total = builder.call(fma, [unit_sum, minimums[index], total])
                sum_ = builder.sitofp(builder.load(self._sums[row, vector]), _FLOATS)
                total = builder.call(fma, [builder.fmul(sum_, unit), scales[index], total])
                place = builder.add(sums, ir.Constant(_INT64, offset))
                builder.store(total, builder.inttoptr(place, _FLOATS.as_pointer())).align = 4

    def _load_halves(self, address: Any, offset: int) -> Any:
        return self._builder.fpext(self._load(address, offset, _HALVES, 16), _FLOATS)

    def _times(self, number: Any, factor: int) -> Any:
        return self._builder.mul(number, ir.Constant(_INT64, factor))

    def _prefetch(self, wanted: Any, line: int) -> None:
        call_prefetch(self._builder, self._builder.add(wanted, ir.Constant(_INT64, line * _LINE)))

    def _load(self, address: Any, offset: int, kind: Any, align: int) -> Any:
        place = self._builder.add(address, ir.Constant(_INT64, offset))
        value = self._builder.load(self._builder.inttoptr(place, kind.as_pointer()))
        value.align = align
        return value

    def _splat(self, number: Any, kind: Any) -> Any:
        builder, undefined = self._builder, ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
        return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * _LANES))
