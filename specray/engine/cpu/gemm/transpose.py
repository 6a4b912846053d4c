"""Layout changes for AMX operands: transposes, and interleaving of 16-bit elements.

Each is a few register shuffles, written out because LLVM would not find them in a loop.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_INT16, _INT32, _INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALVES, _WORDS = ir.VectorType(_INT16, 32), ir.VectorType(_INT32, 16)
_LINE = 64


def _load(builder: Any, address: Any, line: int, kind: Any) -> Any:
    place = builder.add(address, ir.Constant(_INT64, line * _LINE))
    value = builder.load(builder.inttoptr(place, kind.as_pointer()))
    value.align = 2
    return value


def _store(builder: Any, value: Any, address: Any, line: int) -> None:
    place = builder.add(address, ir.Constant(_INT64, line * _LINE))
    builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 2


def _shuffle(builder: Any, first: Any, second: Any, mask: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT32, len(mask)), mask))


@intrinsic
def transpose_to_bfloat16(context: Any, source: Any, target: Any) -> Any:
    """Transposes float32 ``[32, 16]`` to bfloat16 ``[16, 32]``, given addresses; for kernels."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(number: int) -> ir.Constant:
            return ir.Constant(_WORDS, [number] * 16)

        def rounded(line: int) -> Any:
            # Round to nearest, ties to even.
            bits = _load(builder, args[0], line, _WORDS)
            is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
            return builder.add(bits, builder.add(constant(0x7FFF), is_odd))

        rows = [
            builder.or_(
                builder.lshr(rounded(2 * pair), constant(16)),
                builder.and_(rounded(2 * pair + 1), constant(-0x10000)),
            )
            for pair in range(16)
        ]
        for index, row in enumerate(_transposed(builder, rows)):
            _store(builder, row, args[1], index)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    rows = list(rows)
    # Swap off-diagonal blocks, then do the same with half the size within each block.
    for distance in (8, 4, 2, 1):
        low = [lane if not lane & distance else 16 + lane - distance for lane in range(16)]
        high = [lane + distance if not lane & distance else 16 + lane for lane in range(16)]
        for index in range(16):
            if not index & distance:
                first, second = rows[index], rows[index + distance]
                rows[index] = _shuffle(builder, first, second, low)
                rows[index + distance] = _shuffle(builder, first, second, high)
    return rows


@intrinsic
def transpose_words(context: Any, source: Any, stride: Any, target: Any) -> Any:
    """Transposes 32-bit ``[16, 16]``, rows ``stride`` bytes apart, given addresses; for kernels."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, target = args
        rows = [
            _load(builder, builder.add(source, builder.mul(stride, ir.Constant(_INT64, row))), 0, _WORDS)
            for row in range(16)
        ]
        for index, row in enumerate(_transposed(builder, rows)):
            _store(builder, row, target, index)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


_LANES = [range(first, first + 8) for first in range(0, 32, 8)]
"""Indexes of 16-bit elements by 128-bit lane of a register; shuffles within a lane are cheap."""


@intrinsic
def interleave(context: Any, first: Any, second: Any, target: Any) -> Any:
    """Interleaves 32 + 32 elements of 16 bits within 128-bit lanes, given addresses; see ``deinterleave``."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [_load(builder, address, 0, _HALVES) for address in args[:2]]
        for half in range(2):
            numbers = [number for lane in _LANES for number in lane[4 * half : 4 * half + 4]]
            mask = [place for number in numbers for place in (number, 32 + number)]
            _store(builder, _shuffle(builder, values[0], values[1], mask), args[2], half)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def deinterleave(context: Any, address: Any) -> Any:
    """Reorders 32 float32 from the column order of ``interleave`` to natural order, in place."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [number for half in range(2) for lane in _LANES for number in lane[4 * half : 4 * half + 4]]
        values = [_load(builder, args[0], line, _WORDS) for line in range(2)]
        for line in range(2):
            mask = [places.index(16 * line + lane) for lane in range(16)]
            _store(builder, _shuffle(builder, values[0], values[1], mask), args[0], line)
        return context.get_dummy_value()

    return types.void(types.int64), code
