"""Product of integer rows with a panel of weights, emitted as LLVM IR for AVX2 and for AVX-512.

Codes become pairs of 16-bit integers in registers, by shifts and masks, and one instruction multiplies a pair
with a row's pair and adds both products: exact integers, 8 or 16 output features at a time. After a group the
sums are scaled and added to float32 totals in memory. Each total is added to in the order of the groups,
whatever the number of rows and the instruction set, so a row's result depends on neither. Codes that are
floats are multiplied with the row's integers as float32, and added in the order of the input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.cpu.gemm.quantized.integer_rows import BLOCK_BYTES, FACTOR_BYTES, SUMS_OFFSET
from specray.engine.cpu.gemm.quantized.layout import Layout, Numbers
from specray.engine.cpu.gemm.quantized.unpacking import Unpacking
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import call_prefetch
from specray.engine.weights.quantization import GROUP

_LINE = 64
_NUM_PAIRS = GROUP // 2

_FLOAT, _HALF, _BYTE = ir.FloatType(), ir.HalfType(), ir.IntType(8)
_INT16, _INT32, _INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Registers:
    """How sums fill the vector registers of an instruction set."""

    name: str
    """Name in kernel files."""
    lanes: int
    """Output features of a vector."""
    max_rows: int
    """Maximum rows of a tile."""
    few_rows: int
    """Rows up to which all of a panel's vectors are summed in one pass."""
    has_dot_products: bool
    """Whether one instruction multiplies pairs and adds the products to a sum."""

    @property
    def num_vectors(self) -> int:
        return PANEL // self.lanes

    def passes(self, num_rows: int) -> Sequence[range]:
        """Vectors of the panel whose sums are in registers at once."""
        width = self.num_vectors if num_rows <= self.few_rows else 2
        return [range(first, first + width) for first in range(0, self.num_vectors, width)]

    def num_chains(self, num_rows: int) -> int:
        """Sums of a row and vector, added in turns: as many as a dot product takes cycles fill the time."""
        return max(1, 4 // num_rows) if self.has_dot_products else 1


AVX2 = Registers("avx2", lanes=8, max_rows=6, few_rows=1, has_dot_products=False)
"""Sums of 6 rows and 16 output features fill 12 of 16 registers."""
AVX512 = Registers("avx512", lanes=16, max_rows=12, few_rows=12, has_dot_products=True)
"""Sums of 12 rows and 32 output features fill 24 of 32 registers."""


def fastest_registers() -> Registers:
    features = llvmlite.binding.get_host_cpu_features()
    has_dots = all(features.get(name, False) for name in ("avx512bw", "avx512vl", "avx512vnni"))
    return AVX512 if has_dots else AVX2


def make_tile(layout: Layout, registers: Registers) -> Any:
    """Makes ``(num_rows, integers, factors, all_rows, weight, sums, num_blocks, ahead, step)``.

    It adds the product of up to ``registers.max_rows`` integer rows with some super-blocks of a panel to
    ``sums``, float32 ``[num_rows, 32]``. ``integers``, ``factors``, ``weight`` and ``sums`` are addresses of
    the first row's first of these; ``all_rows`` is the number of rows of a group. Each super-block prefetches
    its size at ``ahead``, which then moves by ``step`` bytes.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *others = args
        end = builder.append_basic_block("end")
        switch = builder.switch(num_rows, end)
        for count in range(1, registers.max_rows + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(_INT64, count), block)
            builder.position_at_end(block)
            for vectors in registers.passes(count):
                _Tile(builder, layout, registers, count, vectors).emit(*others)
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
        num_blocks: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), code

    return intrinsic(tile)


@dataclass(frozen=True, slots=True)
class _OfBlock:
    """A super-block's numbers, by vector."""

    scales: dict[int, Any]
    minimums: dict[int, Any]


class _Tile:
    """Emits the product for one number of rows and some vectors of the panel."""

    def __init__(
        self, builder: Any, layout: Layout, registers: Registers, num_rows: int, vectors: range
    ) -> None:
        self._builder, self._layout, self._has_dots = builder, layout, registers.has_dot_products
        self._lanes, self._rows, self._vectors = registers.lanes, range(num_rows), vectors
        self._is_first = vectors.start == 0
        self._floats, self._words, self._halves, self._bytes = (
            ir.VectorType(kind, self._lanes) for kind in (_FLOAT, _INT32, _HALF, _BYTE)
        )
        self._pairs = ir.VectorType(_INT16, 2 * self._lanes)
        self._unpacking = Unpacking(builder, layout, self._lanes)
        is_float = layout.table.is_float
        # Sums of floats depend on their order, which must not depend on the number of rows.
        self._chains = range(1 if is_float else registers.num_chains(num_rows))
        self._sums = {
            (row, vector, chain): cgutils.alloca_once(builder, self._floats if is_float else self._words)
            for row in self._rows
            for vector in vectors
            for chain in self._chains
        }
        self._few = num_rows <= registers.few_rows

    def emit(
        self,
        integers: Any,
        factors: Any,
        all_rows: Any,
        weight: Any,
        sums: Any,
        num_blocks: Any,
        ahead: Any,
        step: Any,
    ) -> None:
        builder, layout = self._builder, self._layout
        with cgutils.for_range(builder, num_blocks, intp=_INT64) as loop:
            block = builder.add(weight, self._times(loop.index, layout.block_bytes))
            wanted = builder.add(ahead, builder.mul(loop.index, step))
            first = self._times(loop.index, layout.num_groups)
            if self._is_first:
                for line in range(layout.factors_offset // _LINE, -(-layout.block_bytes // _LINE)):
                    self._prefetch(wanted, line)
            numbers = self._numbers(block)
            if layout.num_groups == 1:
                row = builder.mul(first, all_rows)
                self._emit_group(block, block, wanted, integers, factors, row, sums, numbers)
            else:
                with cgutils.for_range(builder, ir.Constant(_INT64, layout.num_groups), intp=_INT64) as inner:
                    codes = self._times(inner.index, layout.code_bytes)
                    own = builder.add(block, self._times(inner.index, layout.factor_bytes))
                    row = builder.mul(builder.add(first, inner.index), all_rows)
                    places = builder.add(block, codes), own, builder.add(wanted, codes)
                    self._emit_group(*places, integers, factors, row, sums, numbers)

    def _emit_group(
        self,
        codes: Any,
        own: Any,
        wanted: Any,
        integers: Any,
        factors: Any,
        row: Any,
        sums: Any,
        numbers: _OfBlock,
    ) -> None:
        """Products with a group. ``own``: the super-block's address plus bytes of factors before the group's;
        ``row``: the number of integer rows before its first."""
        builder, layout = self._builder, self._layout
        block = builder.add(integers, self._times(row, BLOCK_BYTES))
        factor = builder.add(factors, self._times(row, FACTOR_BYTES))
        if layout.table.is_float:
            self._emit_floats(codes, block, wanted)
            self._emit_totals(own, 0, factor, sums, numbers)
            return
        num_direct = layout.per_lane * layout.bits
        each = _NUM_PAIRS // layout.halves
        for half in range(layout.halves):
            pairs = range(half * each, (half + 1) * each)
            self._emit_beginning(factor, half)
            self._emit_words(
                range(pairs.start // layout.per_lane, min(pairs.stop, num_direct) // layout.per_lane),
                codes,
                block,
                wanted,
            )
            for pair in range(max(pairs.start, num_direct), pairs.stop):
                weights = {v: self._unpacking.rest(codes, v, pair) for v in self._vectors}
                self._emit_products(weights, block, pair * 4, pair)
            self._emit_totals(own, half, factor, sums, numbers)

    def _emit_beginning(self, factor: Any, half: int) -> None:
        """Sums begin at what the codes' offset adds to them."""
        builder, layout = self._builder, self._layout
        for row in self._rows:
            start: Any = ir.Constant(self._words, [0] * self._lanes)
            if layout.offset:
                places = [half] if layout.halves == 2 else [0, 1]
                parts = [
                    self._load(factor, row * FACTOR_BYTES + SUMS_OFFSET + 4 * place, _INT32, 4)
                    for place in places
                ]
                total = parts[0] if len(parts) == 1 else builder.add(*parts)
                start = self._splat(builder.mul(total, ir.Constant(_INT32, -layout.offset)), self._words)
            for vector in self._vectors:
                for chain in self._chains:
                    zero = ir.Constant(self._words, [0] * self._lanes)
                    builder.store(zero if chain else start, self._sums[row, vector, chain])

    def _emit_words(self, words: range, codes: Any, block: Any, wanted: Any) -> None:
        """Products with the whole codes of some words of each output feature."""
        builder, per_lane = self._builder, self._layout.per_lane
        count = ir.Constant(_INT64, len(words))
        with cgutils.for_range(builder, count, intp=_INT64) as loop:
            index = builder.add(loop.index, ir.Constant(_INT64, words.start))
            offset = self._times(index, PANEL * 4)
            place, numbers = builder.add(codes, offset), builder.add(block, self._times(index, 4 * per_lane))
            if self._is_first:
                for line in range(PANEL * 4 // _LINE):
                    self._prefetch(builder.add(wanted, offset), line)
            # Tables are looked up once for the codes of a word.
            loaded = {vector: self._unpacking.load(place, vector) for vector in self._vectors}
            for slot in range(per_lane):
                if not self._few:
                    self._emit_barrier()
                weights = {v: self._unpacking.whole(loaded[v], slot) for v in self._vectors}
                self._emit_products(weights, numbers, slot * 4, slot)

    def _emit_floats(self, codes: Any, block: Any, wanted: Any) -> None:
        builder, size = self._builder, self._layout.feature_bytes
        fma, pair_lines = self._fma(), 2 * size // _LINE
        for total in self._sums.values():
            builder.store(ir.Constant(self._floats, [0.0] * self._lanes), total)
        with cgutils.for_range(builder, ir.Constant(_INT64, _NUM_PAIRS), intp=_INT64) as loop:
            place = builder.add(codes, self._times(loop.index, 2 * size))
            numbers = builder.add(block, self._times(loop.index, 4))
            if self._is_first:
                for line in range(pair_lines):
                    self._prefetch(builder.add(wanted, self._times(loop.index, 2 * size)), line)
            for odd in range(2):
                feature = builder.add(place, ir.Constant(_INT64, odd * size))
                weights = {vector: self._unpacking.floats(feature, vector) for vector in self._vectors}
                for row in self._rows:
                    number = self._load(numbers, row * BLOCK_BYTES + 2 * odd, _INT16, 2)
                    operand = self._splat(builder.sitofp(number, _FLOAT), self._floats)
                    for vector, weight in weights.items():
                        total = self._sums[row, vector, 0]
                        builder.store(builder.call(fma, [operand, weight, builder.load(total)]), total)

    def _emit_products(self, weights: dict[int, Any], numbers: Any, offset: int, turn: int) -> None:
        """Products of each row's pair at an address with a pair of codes."""
        builder, chain = self._builder, turn % len(self._chains)
        name = "avx512.vpdpwssd.512" if self._has_dots else "avx2.pmadd.wd"
        args = [self._pairs, self._pairs]
        kind = ir.FunctionType(self._words, [self._words, *args] if self._has_dots else args)
        multiply = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
        for row in self._rows:
            number = self._load(numbers, row * BLOCK_BYTES + offset, _INT32, 4)
            operand = builder.bitcast(self._splat(number, self._words), self._pairs)
            for vector, weight in weights.items():
                total = self._sums[row, vector, chain]
                if self._has_dots:
                    sum_ = builder.call(multiply, [builder.load(total), weight, operand])
                else:
                    product = builder.call(multiply, [operand, weight])
                    sum_ = self._kept(builder.add(builder.load(total), product))
                builder.store(sum_, total)

    def _emit_barrier(self) -> None:
        """Keeps LLVM from loading the next pairs' numbers early, for which there are no registers."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self._builder.asm(kind, "", "~{memory}", [], side_effect=True)

    def _kept(self, sums: Any) -> Any:
        """The sums as they are, in a register. Else LLVM adds several products first, and keeps them all."""
        kind = ir.FunctionType(self._words, [self._words])
        return self._builder.asm(kind, "", "=x,0", [sums], side_effect=False)

    def _numbers(self, block: Any) -> _OfBlock:
        layout = self._layout

        def load(offset: int) -> dict[int, Any]:
            return {v: self._load_numbers(block, layout.numbers_offset + offset, v) for v in self._vectors}

        has_minimums = layout.minimums is not Numbers.NONE
        return _OfBlock(load(0), load(layout.number_bytes) if has_minimums else {})

    def _load_numbers(self, address: Any, offset: int, vector: int) -> Any:
        if self._layout.is_float32:
            return self._load(address, offset + vector * self._lanes * 4, self._floats, 32)
        halves = self._load(address, offset + vector * self._lanes * 2, self._halves, 16)
        return self._builder.fpext(halves, self._floats)

    def _factors(self, own: Any, kind: Numbers, index: int, numbers: dict[int, Any]) -> dict[int, Any]:
        """The super-block's numbers, times a group's own factors."""
        if not kind.is_factor or not numbers:
            return numbers
        builder, found = self._builder, {}
        for vector, number in numbers.items():
            offset = self._layout.factors_offset + index * PANEL + vector * self._lanes
            codes = self._load(own, offset, self._bytes, 8)
            # Neither has more than 8 bits, so a conversion from signed integers serves both.
            widen = builder.zext if kind is Numbers.UINT8 else builder.sext
            found[vector] = builder.fmul(builder.sitofp(widen(codes, self._words), self._floats), number)
        return found

    def _emit_totals(self, own: Any, half: int, factor: Any, sums: Any, numbers: _OfBlock) -> None:
        """Adds a group's sums to the totals: ``unit * sum * scale``, and before it ``unit * sum of integers *
        minimum``."""
        builder, layout, fma = self._builder, self._layout, self._fma()
        scales = self._factors(own, layout.scales, half, numbers.scales)
        place = layout.halves * layout.scales.is_factor
        minimums = self._factors(own, layout.minimums, place, numbers.minimums) if half == 0 else {}
        for row in self._rows:
            unit, unit_sum = (
                self._splat(self._load(factor, row * FACTOR_BYTES + offset, _FLOAT, 4), self._floats)
                for offset in (0, 4)
            )
            for vector in self._vectors:
                offset = (row * PANEL + vector * self._lanes) * 4
                total = self._load(sums, offset, self._floats, 4)
                if minimums:
                    total = builder.call(fma, [unit_sum, minimums[vector], total])
                sum_ = self._sum(row, vector)
                total = builder.call(fma, [builder.fmul(sum_, unit), scales[vector], total])
                place_ = builder.add(sums, ir.Constant(_INT64, offset))
                builder.store(total, builder.inttoptr(place_, self._floats.as_pointer())).align = 4

    def _sum(self, row: int, vector: int) -> Any:
        """A group's sums, as float32."""
        builder = self._builder
        total, *others = [builder.load(self._sums[row, vector, chain]) for chain in self._chains]
        for other in others:
            total = builder.add(total, other)
        return total if self._layout.table.is_float else builder.sitofp(total, self._floats)

    def _fma(self) -> Any:
        kind = ir.FunctionType(self._floats, [self._floats] * 3)
        return cgutils.get_or_insert_function(self._builder.module, kind, f"llvm.fma.v{self._lanes}f32")

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
        shape = ir.Constant(ir.VectorType(_INT32, self._lanes), [0] * self._lanes)
        return builder.shuffle_vector(first, undefined, shape)
