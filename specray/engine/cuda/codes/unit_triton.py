"""One unit of some output features in registers: codes as exact numbers, scales and minimums in float32.

Everything here is exact: codes have at most 9 bits and are numbers of any of the types that are multiplied,
and scales are products of at most 24 bits. Importing it needs triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from specray.engine.cuda.codes.layout import Codes, Minimums, Scales
from specray.engine.cuda.codes.packed import PackedWeight
from specray.engine.weights.block_codes import IQ4_VALUES


def _packed_table(values: tuple[int, ...]) -> int:
    """Four signed bytes as one integer of 32 bits with a sign, the first in its lowest bits."""
    return int.from_bytes(bytes(value & 255 for value in values), "little", signed=True)


# Triton reads constants of a module as constexpr only.
_INTEGERS = tl.constexpr(int(Codes.INTEGERS))
_IQ4 = tl.constexpr(int(Codes.IQ4))
_E2M1 = tl.constexpr(int(Codes.E2M1))
_NO_SCALES = tl.constexpr(int(Scales.NONE))
_NUMBER = tl.constexpr(int(Scales.NUMBER))
_UINT8 = tl.constexpr(int(Scales.UINT8))
_INT8 = tl.constexpr(int(Scales.INT8))
_E8M0 = tl.constexpr(int(Scales.E8M0))
_MINIMUM_NUMBER = tl.constexpr(int(Minimums.NUMBER))
_IQ4_0 = tl.constexpr(_packed_table(IQ4_VALUES[:4]))
_IQ4_1 = tl.constexpr(_packed_table(IQ4_VALUES[4:8]))
_IQ4_2 = tl.constexpr(_packed_table(IQ4_VALUES[8:12]))
_IQ4_3 = tl.constexpr(_packed_table(IQ4_VALUES[12:]))


@triton.jit
def _e4m3(code):
    """Floating-point numbers of 8 bits in float32: float16 has their exponent 8 lower."""
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e2m1(code):
    """Floating-point numbers of 4 bits in float32: float16 has their exponent 14 lower."""
    wide = code.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _iq4(code):
    """Values of a table of 16 bytes, as int8."""
    wide = code.to(tl.int32)
    is_odd = (wide & 4) != 0
    lower = tl.where(is_odd, _IQ4_1, _IQ4_0)
    upper = tl.where(is_odd, _IQ4_3, _IQ4_2)
    word = tl.where((wide & 8) != 0, upper, lower)
    value = (word >> ((wide & 3) * 8)) & 255
    return (value - ((value & 128) << 1)).to(tl.int8)


@triton.jit
def _numbers_of(
    raw, zero, DTYPE: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """What codes stand for, less the zero of their run."""
    if CODES == _INTEGERS:
        if BITS == 8:
            numbers = raw.to(tl.int8, bitcast=True)
            if HAS_ZEROS:
                numbers = numbers.to(tl.int16) - zero.to(tl.int16)[None, :]
        elif HAS_ZEROS:
            numbers = raw.to(tl.int8) - zero[None, :]
        else:
            numbers = raw.to(tl.int8) - OFFSET
    elif CODES == _IQ4:
        numbers = _iq4(raw)
    elif CODES == _E2M1:
        numbers = _e2m1(raw)
    else:
        numbers = _e4m3(raw)
    return numbers.to(DTYPE)


@triton.jit
def load_codes(
    codes, words, zeros, unit, column, is_column, size,
    DTYPE: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    HAS_ZEROS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """The codes of both halves of a unit's features, ``[16, columns]`` each."""
    inner = tl.arange(0, 16)
    is_code = is_column[None, :]
    wide_column = column.to(tl.int64)
    place = unit * size + wide_column
    if BITS == 8:
        at = codes + place[None, :] * 32 + inner[:, None]
        low = tl.load(at, mask=is_code, other=0)
        high = tl.load(at + 16, mask=is_code, other=0)
    else:
        both = tl.load(codes + place[None, :] * 16 + inner[:, None], mask=is_code, other=0)
        low = both & 15
        high = both >> 4
        if BITS == 5:
            upper = tl.load(words + place, mask=is_column, other=0)[None, :]
            low = low.to(tl.int32) | (((upper >> inner[:, None]) & 1) << 4)
            high = high.to(tl.int32) | (((upper >> (inner + 16)[:, None]) & 1) << 4)
        elif BITS == 6:
            at = words + 2 * unit * size + wide_column
            shift = (2 * inner)[:, None]
            first = tl.load(at, mask=is_column, other=0)[None, :]
            second = tl.load(at + size, mask=is_column, other=0)[None, :]
            low = low.to(tl.int32) | (((first >> shift) & 3) << 4)
            high = high.to(tl.int32) | (((second >> shift) & 3) << 4)
    zero = column
    if HAS_ZEROS:
        zero = tl.load(zeros + (unit // RUN) * size + wide_column, mask=is_column, other=0)
    low = _numbers_of(low, zero, DTYPE, BITS, CODES, OFFSET, HAS_ZEROS)
    high = _numbers_of(high, zero, DTYPE, BITS, CODES, OFFSET, HAS_ZEROS)
    return low, high


@triton.jit
def _scale_of(factor, number, SCALES: tl.constexpr):
    if SCALES == _UINT8:
        scale = number * factor.to(tl.float32)
    elif SCALES == _INT8:
        scale = number * factor.to(tl.int8, bitcast=True).to(tl.float32)
    elif SCALES == _E8M0:
        exponent = factor.to(tl.int32)
        # The power below the smallest normal number has its bit in the mantissa.
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = _e4m3(factor)
    return scale


@triton.jit
def load_scales(
    factors, numbers, unit, column, is_column, size,
    SCALES: tl.constexpr, MINIMUMS: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr,
    NUM_FACTORS: tl.constexpr, NUM_NUMBERS: tl.constexpr,
):  # fmt: skip
    """The scales of both halves of a unit, and its minimum: ``[columns]`` each, float32."""
    of_factors = factors + unit * (NUM_FACTORS * size) + column.to(tl.int64)
    of_numbers = numbers + (unit // RUN) * (NUM_NUMBERS * size) + column.to(tl.int64)
    number = 1.0
    if NUM_NUMBERS > 0:
        number = tl.load(of_numbers, mask=is_column, other=0.0).to(tl.float32)
    low = number
    if SCALES > _NUMBER:
        low = _scale_of(tl.load(of_factors, mask=is_column, other=0), number, SCALES)
    high = low
    if HALVES == 2:
        high = _scale_of(tl.load(of_factors + size, mask=is_column, other=0), number, SCALES)
    minimum = 0.0
    if MINIMUMS != 0:
        minimum = tl.load(of_numbers + size, mask=is_column, other=0.0).to(tl.float32)
        if MINIMUMS != _MINIMUM_NUMBER:
            own = tl.load(of_factors + HALVES * size, mask=is_column, other=0)
            minimum = -(minimum * own.to(tl.float32))
    return low, high, minimum


def constants_of(weight: PackedWeight) -> dict[str, Any]:
    """What kernels are compiled for of a weight's layout."""
    layout = weight.layout
    return {
        "BITS": layout.bits,
        "CODES": int(layout.codes),
        "OFFSET": layout.offset,
        "SCALES": int(layout.scales),
        "MINIMUMS": int(layout.minimums),
        "HALVES": layout.halves,
        "RUN": layout.run,
        "NUM_FACTORS": layout.num_factors,
        "NUM_NUMBERS": layout.num_numbers,
        "HAS_ZEROS": layout.has_zeros,
        "HAS_OUTER": layout.has_outer,
        "HAS_ORDER": weight.order is not None,
    }


def pointers_of(weight: PackedWeight) -> tuple[Any, ...]:
    """A weight's tensors as kernels take them; one that is not there is not read."""
    codes = weight.codes
    others = weight.words, weight.factors, weight.numbers, weight.zeros, weight.outer, weight.order
    return codes, *(codes if each is None else each for each in others)
