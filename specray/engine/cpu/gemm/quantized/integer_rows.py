"""Rows as 16-bit integers in blocks of 32 features, each with a power of two of its own as its unit.

A bfloat16 number of a block is held exactly down to 1/128 of the block's largest. What smaller ones lose is
less than 1/128 of what bfloat16 itself rounds off the largest. A float32 row becomes two integer rows, of
which the second holds in units of 2^-15 what the first leaves over. Integers depend on their own row alone.

Pairs of 16-bit integers are what AVX2 multiplies fastest: twice as many products per second as in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.cpu.thread_pool import Kernel, ThreadPool, as_pointer

BLOCK = 32
"""Features of a block: a group of the weights."""
BLOCK_BYTES = 2 * BLOCK
FACTOR_BYTES = 16
"""Bytes of a block's factors: float32 its unit, and the unit times the sum of its integers; int32 the sums of
either half of its integers."""
SUMS_OFFSET = 8
"""Bytes of a block's factors before the sums."""
_MIN_EXPONENT = 30
"""Least biased exponent of a block's largest number, so that no unit is subnormal."""
_MIN_SHARED_SIZE = 32_768
"""Minimum number of elements for which a second thread pays off."""
_ROWS, _NUM_ROWS, _NUM_BLOCKS, _INTEGERS, _FACTORS, _IS_FLOAT = range(6)
_NUM_ARGS = 6

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _HALVES, _WORDS = (ir.VectorType(kind, BLOCK) for kind in (_FLOAT, _INT16, _INT32))


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Integer rows, block by block: of one block the rows follow each other."""

    integers: torch.Tensor  # int16 [blocks, num_rows, 32]
    factors: torch.Tensor  # float32 [blocks, num_rows, 4], of which the last two are int32

    @property
    def num_rows(self) -> int:
        """Integer rows; two for each float32 row."""
        return self.integers.shape[1]


def integer_rows(rows: torch.Tensor, thread_pool: ThreadPool) -> IntegerRows:
    """Converts contiguous rows ``[num_rows, in_features]``, bfloat16 or float32; features fill blocks."""
    num_rows, num_features = rows.shape
    is_float, num_blocks = rows.dtype == torch.float32, num_features // BLOCK
    count = num_rows * (2 if is_float else 1)
    converted = IntegerRows(
        thread_pool.empty((num_blocks, count, BLOCK), torch.int16),
        thread_pool.empty((num_blocks, count, FACTOR_BYTES // 4), torch.float32),
    )
    addresses = rows.data_ptr(), converted.integers.data_ptr(), converted.factors.data_ptr()
    args = np.array(
        [addresses[0], num_rows, num_blocks, addresses[1], addresses[2], is_float], dtype=np.int64
    )
    num_parts = thread_pool.size if rows.numel() >= _MIN_SHARED_SIZE else 1
    thread_pool.run(_kernel(), args.ctypes.data, num_parts)
    return converted


@functools.cache
def _kernel() -> Kernel:
    return Kernel("integer-rows", _NUM_ARGS, _make_kernel)


def _make_kernel() -> Any:
    convert_bfloat16, convert_float32 = _make_convert(is_float=False), _make_convert(is_float=True)

    def convert(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_blocks = args[_NUM_ROWS], args[_NUM_BLOCKS]
        rows, integers, factors = args[_ROWS], args[_INTEGERS], args[_FACTORS]
        for block in range(num_blocks * part // num_parts, num_blocks * (part + 1) // num_parts):
            if args[_IS_FLOAT]:
                for row in range(num_rows):
                    place = rows + (row * num_blocks + block) * BLOCK * 4
                    at = 2 * (block * num_rows + row)
                    convert_float32(place, integers + at * BLOCK_BYTES, factors + at * FACTOR_BYTES)
            else:
                for row in range(num_rows):
                    place = rows + (row * num_blocks + block) * BLOCK * 2
                    at = block * num_rows + row
                    convert_bfloat16(place, integers + at * BLOCK_BYTES, factors + at * FACTOR_BYTES)

    return convert


def _make_convert(*, is_float: bool) -> Any:
    """Makes ``(block of a row, integers, factors)``, all addresses; float32 makes the next row's, too."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, integers, factors = args
        numbers = _load_numbers(builder, source, is_float=is_float)
        exponent, is_finite = _largest_exponent(builder, numbers)
        units = [exponent, builder.sub(exponent, ir.Constant(_INT32, 15))] if is_float else [exponent]
        for row, biased in enumerate(units):
            unit, inverse = _unit(builder, biased)
            scaled = builder.fmul(numbers, _splat(builder, inverse, _FLOATS))
            if not is_float:
                scaled = _call(builder, "llvm.rint.v32f32", _FLOATS, scaled)
            words = builder.fptosi(scaled, _WORDS)
            if is_float and row == 0:
                # Exact: the unit is a power of two, and truncation leaves the lower bits.
                whole = builder.fmul(builder.sitofp(words, _FLOATS), _splat(builder, unit, _FLOATS))
                numbers = builder.fsub(numbers, whole)
            _store(builder, builder.trunc(words, _HALVES), integers, row * BLOCK_BYTES)
            first, second = (_half_sum(builder, words, half) for half in (0, 1))
            # A row that is not finite must give no finite sum.
            unit = builder.select(is_finite, unit, ir.Constant(_FLOAT, float("nan")))
            total = builder.sitofp(builder.add(first, second), _FLOAT)
            numbers_of_block = unit, builder.fmul(total, unit), first, second
            for place, number in enumerate(numbers_of_block):
                _store(builder, number, factors, row * FACTOR_BYTES + 4 * place)
        return context.get_dummy_value()

    def convert(context: Any, source: Any, integers: Any, factors: Any) -> Any:
        return types.void(types.int64, types.int64, types.int64), code

    return intrinsic(convert)


def _half_sum(builder: Any, words: Any, half: int) -> Any:
    """The sum of the first or second half of a block's integers."""
    count = BLOCK // 2
    places = ir.Constant(ir.VectorType(_INT32, count), [half * count + index for index in range(count)])
    part = builder.shuffle_vector(words, words, places)
    return _call(builder, f"llvm.vector.reduce.add.v{count}i32", _INT32, part)


def _load_numbers(builder: Any, source: Any, *, is_float: bool) -> Any:
    value = builder.load(builder.inttoptr(source, (_FLOATS if is_float else _HALVES).as_pointer()))
    value.align = 4 if is_float else 2
    if is_float:
        return value
    sixteen = ir.Constant(_WORDS, [16] * BLOCK)
    return builder.bitcast(builder.shl(builder.zext(value, _WORDS), sixteen), _FLOATS)


def _largest_exponent(builder: Any, numbers: Any) -> tuple[Any, Any]:
    """The biased exponent of the largest magnitude, not too small for a unit; and whether all are finite."""
    magnitudes = builder.and_(builder.bitcast(numbers, _WORDS), ir.Constant(_WORDS, [0x7FFF_FFFF] * BLOCK))
    largest = _call(builder, "llvm.vector.reduce.umax.v32i32", _INT32, magnitudes)
    exponent = builder.lshr(largest, ir.Constant(_INT32, 23))
    is_finite = builder.icmp_unsigned("<", exponent, ir.Constant(_INT32, 255))
    least = ir.Constant(_INT32, _MIN_EXPONENT)
    is_small = builder.icmp_unsigned("<", exponent, least)
    return builder.select(is_small, least, exponent), is_finite


def _unit(builder: Any, exponent: Any) -> tuple[Any, Any]:
    """2^(exponent - 127 - 14), so that integers stay below 2^15, and its inverse."""
    place = ir.Constant(_INT32, 23)
    unit = builder.shl(builder.sub(exponent, ir.Constant(_INT32, 14)), place)
    inverse = builder.shl(builder.sub(ir.Constant(_INT32, 268), exponent), place)
    return builder.bitcast(unit, _FLOAT), builder.bitcast(inverse, _FLOAT)


def _call(builder: Any, name: str, result: Any, argument: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [argument])


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * BLOCK))


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    place = builder.add(address, ir.Constant(_INT64, offset))
    builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 2
