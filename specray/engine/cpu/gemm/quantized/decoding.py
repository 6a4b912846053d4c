"""GGUF's blocks taken apart in compiled code: codes as bytes, a group's own factors, a block's numbers.

Each function takes the bytes of one block and writes codes (not negative, before any table), factors group by
group, and numbers as the bits of float16 or float32, as the type's layout holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specray.engine.cpu.simd import kernel
from specray.engine.weights.block_type import BlockType

_SIGN = 0x8000
"""Sign bit of a float16: what blocks subtract is held as what is added."""


@kernel(forceinline=True)
def _half(block: Any, at: int) -> Any:
    return block[at] | block[at + 1] << 8


@kernel(forceinline=True)
def _nibbles(block: Any, at: int, codes: Any, to: int, count: int) -> None:
    """Codes of 4 bits, of ``2 * count`` input features: the low ones of the bytes, then the high ones."""
    for index in range(count):
        codes[to + index] = block[at + index] & 15
    for index in range(count):
        codes[to + count + index] = block[at + index] >> 4


@kernel(forceinline=True)
def _fifth_bits(block: Any, at: int, codes: Any) -> None:
    for byte in range(4):
        bits = block[at + byte]
        for index in range(8):
            codes[8 * byte + index] |= ((bits >> index) & 1) << 4


@kernel()
def _q4_0(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    _nibbles(block, 2, codes, 0, 16)
    numbers[0] = _half(block, 0)


@kernel()
def _q4_1(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    _nibbles(block, 4, codes, 0, 16)
    numbers[0], numbers[1] = _half(block, 0), _half(block, 2)


@kernel()
def _q5_0(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    _nibbles(block, 6, codes, 0, 16)
    _fifth_bits(block, 2, codes)
    numbers[0] = _half(block, 0)


@kernel()
def _q5_1(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    _nibbles(block, 8, codes, 0, 16)
    _fifth_bits(block, 4, codes)
    numbers[0], numbers[1] = _half(block, 0), _half(block, 2)


@kernel()
def _q8_0(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    for index in range(32):
        codes[index] = block[2 + index] ^ 0x80
    numbers[0] = _half(block, 0)


@kernel()
def _mxfp4(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    _nibbles(block, 1, codes, 0, 16)
    # 2^(byte - 128); the two smallest are subnormal.
    exponent = block[0]
    numbers[0] = (exponent - 1) << 23 if exponent > 1 else 1 << (21 + exponent)


@kernel(forceinline=True)
def _two_levels(block: Any, factors: Any, numbers: Any) -> None:
    """Scales and minimums of 6 bits, and both numbers of a block."""
    for group in range(4):
        factors[2 * group] = block[4 + group] & 63
        factors[2 * group + 1] = block[8 + group] & 63
    for group in range(4, 8):
        factors[2 * group] = block[8 + group] & 15 | block[group] >> 6 << 4
        factors[2 * group + 1] = block[8 + group] >> 4 | block[4 + group] >> 6 << 4
    numbers[0], numbers[1] = _half(block, 0), _half(block, 2) ^ _SIGN


@kernel()
def _q4_k(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    for run in range(4):
        _nibbles(block, 16 + 32 * run, codes, 64 * run, 32)
    _two_levels(block, factors, numbers)


@kernel()
def _q5_k(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    for run in range(4):
        _nibbles(block, 48 + 32 * run, codes, 64 * run, 32)
    for group in range(8):
        for index in range(32):
            codes[32 * group + index] |= ((block[16 + index] >> group) & 1) << 4
    _two_levels(block, factors, numbers)


@kernel()
def _q6_k(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    for run in range(2):
        _nibbles(block, 64 * run, codes, 128 * run, 64)
        for part in range(4):
            for index in range(32):
                bits = block[128 + 32 * run + index] >> (2 * part) & 3
                codes[128 * run + 32 * part + index] |= bits << 4
    for half in range(16):
        factors[half] = block[192 + half]
    numbers[0] = _half(block, 208)


@kernel()
def _iq4_xs(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
    high = _half(block, 2)
    for group in range(8):
        _nibbles(block, 8 + 16 * group, codes, 32 * group, 16)
        low = block[4 + group // 2] >> (4 * (group % 2)) & 15
        factors[group] = (low | (high >> (2 * group) & 3) << 4) - 32
    numbers[0] = _half(block, 0)


DECODE: Mapping[BlockType, Any] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.IQ4_NL: _q4_0,
    BlockType.IQ4_XS: _iq4_xs,
    BlockType.MXFP4: _mxfp4,
}
"""``(block, codes, factors, numbers)``: arrays of uint8, and the last of int32."""
