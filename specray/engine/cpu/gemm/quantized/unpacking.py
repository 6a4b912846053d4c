"""Codes of a layout in registers, as pairs of 16-bit integers or as floats, emitted as LLVM IR."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from specray.engine.cpu.gemm.quantized.layout import LANE, Layout, Table
from specray.engine.cpu.gemm.vector import PANEL

_BYTE, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SHARE = 16
"""Bytes of a register within which a table is looked up."""


class Unpacking:
    """Emits the codes of one vector of output features; a lane for the even input feature, one for the odd.

    Args:
        lanes: output features of a vector.
    """

    def __init__(self, builder: Any, layout: Layout, lanes: int) -> None:
        self._builder, self._layout, self._lanes = builder, layout, lanes
        self._words, self._pairs = ir.VectorType(_INT32, lanes), ir.VectorType(_INT16, 2 * lanes)
        self._bytes = ir.VectorType(_BYTE, 4 * lanes)

    def load(self, words: Any, vector: int) -> tuple[Any, ...]:
        """A word of each output feature from an address; with a table, values of its even and odd codes."""
        builder = self._builder
        place = builder.add(words, ir.Constant(_INT64, vector * self._lanes * 4))
        value = builder.load(builder.inttoptr(place, self._words.as_pointer()))
        value.align = 32
        pairs = builder.bitcast(value, self._pairs)
        if self._layout.table is Table.THEMSELVES:
            return (pairs,)
        low = self._constant(0x0F0F)
        four = self._constant(4)
        return tuple(
            self._looked_up(builder.and_(codes, low)) for codes in (pairs, builder.lshr(pairs, four))
        )

    def whole(self, loaded: tuple[Any, ...], slot: int) -> Any:
        """The pair of whole codes at a place of the lanes."""
        if self._layout.table is Table.THEMSELVES:
            return self._piece(loaded[0], slot * self._layout.bits, self._layout.bits, 0)
        # Of a lane's two bytes each has an even code, and an odd one above it.
        return self._piece(loaded[slot % 2], 8 * (slot // 2), 8, 0)

    def rest(self, codes: Any, vector: int, pair: int) -> Any:
        """A pair of codes that lies in pieces; ``codes`` is the address of the group's words."""
        builder, found = self._builder, None
        for word, source, width, place in self._layout.pieces(pair):
            address = builder.add(codes, ir.Constant(_INT64, word * PANEL * 4))
            piece = self._piece(self.load(address, vector)[0], source, width, place)
            found = piece if found is None else builder.or_(found, piece)
        return found

    def floats(self, codes: Any, vector: int) -> Any:
        """The floats of one input feature, float32, from the address of its codes."""
        builder, size = self._builder, self._layout.bits // 8
        place = builder.add(codes, ir.Constant(_INT64, vector * self._lanes * size))
        halves, words = (ir.VectorType(kind, self._lanes) for kind in (ir.HalfType(), _INT16))
        stored = halves if self._layout.table is Table.HALF else ir.VectorType(_BYTE, self._lanes)
        value = builder.load(builder.inttoptr(place, stored.as_pointer()))
        value.align = 8
        if self._layout.table is Table.E4M3:
            # Its sign stays the highest bit, but comes a second time below it.
            moved = builder.shl(builder.sext(value, words), ir.Constant(words, [7] * self._lanes))
            kept = builder.and_(moved, ir.Constant(words, [0xBFFF] * self._lanes))
            value = builder.bitcast(kept, halves)
        return builder.fpext(value, ir.VectorType(ir.FloatType(), self._lanes))

    def _piece(self, pairs: Any, source: int, width: int, place: int) -> Any:
        """Some bits of each lane, moved to their place, and zeros."""
        builder, shift = self._builder, source - place
        if shift > 0:
            pairs = builder.lshr(pairs, self._constant(shift))
        elif shift < 0:
            pairs = builder.shl(pairs, self._constant(-shift))
        is_alone = place == 0 and source + width == LANE
        return pairs if is_alone else builder.and_(pairs, self._constant(((1 << width) - 1) << place))

    def _looked_up(self, codes: Any) -> Any:
        """A table's values with the offset added, for the code in each byte."""
        builder, layout = self._builder, self._layout
        name = "avx2.pshuf.b" if self._bytes.count == 32 else "avx512.pshuf.b.512"
        kind = ir.FunctionType(self._bytes, [self._bytes, self._bytes])
        look_up = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
        values = [value + layout.offset for value in layout.table.values]
        table = ir.Constant(self._bytes, values * (self._bytes.count // _SHARE))
        found = builder.call(look_up, [table, builder.bitcast(codes, self._bytes)])
        return builder.bitcast(found, self._pairs)

    def _constant(self, number: int) -> ir.Constant:
        return ir.Constant(self._pairs, [number] * 2 * self._lanes)
