"""Memory layouts of weights in codes on CUDA: streams of units of 32 input features.

The codes of a unit and an output feature are 16 bytes: the low halves are features 0 to 15, the high halves
16 to 31. Of codes with 5 or 6 bits the upper ones are in words apart; codes of 8 bits take 32 bytes. Output
features lie side by side, so that neighbouring programs, which take some of them through all units, read
neighbouring memory. A value is ``code * scale + minimum``, times the output feature's factor. Scales are a
number of a run of units, a factor of the unit (or of each of its halves), or their product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from specray.engine.weights.block_type import BlockType
from specray.engine.weights.quantization import GROUP

NUM_BITS = 8
"""Bits of a byte."""


class Codes(IntEnum):
    """What codes stand for; values are those that kernels compare with."""

    INTEGERS = 0
    IQ4 = 1
    E2M1 = 2
    """Floating-point numbers of 4 bits."""
    E4M3 = 3
    """Floating-point numbers of 8 bits."""


class Scales(IntEnum):
    """How scales are held."""

    NONE = 0
    NUMBER = 1
    """One number of a run of units."""
    UINT8 = 2
    """Such a number times an unsigned factor of the unit."""
    INT8 = 3
    E8M0 = 4
    """A power of two of the unit: its exponent, plus 127."""
    E4M3 = 5


class Minimums(IntEnum):
    """How minimums are held."""

    NONE = 0
    NUMBER = 1
    UINT8 = 2
    """A number of a run of units, times a factor of the unit, which is subtracted."""


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """What is held of a unit, and of a run of units."""

    bits: int
    """Bits of a code: 4, 5, 6 or 8."""
    codes: Codes = Codes.INTEGERS
    offset: int = 0
    """Subtracted from integer codes of fewer than 8 bits; those of 8 have a sign."""
    scales: Scales = Scales.NUMBER
    minimums: Minimums = Minimums.NONE
    halves: int = 1
    """Scales of a unit: 1, or 2 for each half of its features."""
    run: int = 1
    """Units that share numbers."""
    has_zeros: bool = False
    """Whether an integer of each run is subtracted from its codes."""
    has_outer: bool = False
    """Whether output features have factors."""
    number_bytes: int = 2
    """Bytes of a number: 2 (float16) or 4 (float32)."""

    @property
    def code_bytes(self) -> int:
        """Bytes of a unit's codes, without those in words apart."""
        return GROUP if self.bits == NUM_BITS else GROUP // 2

    @property
    def num_words(self) -> int:
        """Words of 32 bits with the upper bits of a unit's codes."""
        return self.bits - 4 if self.bits in (5, 6) else 0

    @property
    def num_factors(self) -> int:
        """Bytes of a unit's factors: its scales, then its minimum."""
        return self.halves * (self.scales >= Scales.UINT8) + (self.minimums is Minimums.UINT8)

    @property
    def num_numbers(self) -> int:
        """Numbers of a run: its scale, then its minimum."""
        is_scaled = self.scales in (Scales.NUMBER, Scales.UINT8, Scales.INT8)
        return is_scaled + (self.minimums is not Minimums.NONE)

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight with its share of all numbers but those of output features."""
        unit = self.code_bytes + 4 * self.num_words + self.num_factors
        return NUM_BITS * (unit + (self.num_numbers * self.number_bytes + self.has_zeros) / self.run) / GROUP


INT8, INT4 = CodeLayout(8), CodeLayout(4, minimums=Minimums.NUMBER)
"""Layouts of weights that are quantised when they are loaded."""
NVFP4 = CodeLayout(4, Codes.E2M1, scales=Scales.E4M3, halves=2, has_outer=True)
"""Layout of floating-point codes of 4 bits with scales of 16."""

BLOCK_LAYOUTS: Mapping[BlockType, CodeLayout] = {
    BlockType.Q4_0: CodeLayout(4, offset=8),
    BlockType.Q4_1: INT4,
    BlockType.Q5_0: CodeLayout(5, offset=16),
    BlockType.Q5_1: CodeLayout(5, minimums=Minimums.NUMBER),
    BlockType.Q8_0: INT8,
    BlockType.Q4_K: CodeLayout(4, scales=Scales.UINT8, minimums=Minimums.UINT8, run=8),
    BlockType.Q5_K: CodeLayout(5, scales=Scales.UINT8, minimums=Minimums.UINT8, run=8),
    BlockType.Q6_K: CodeLayout(6, offset=32, scales=Scales.INT8, halves=2, run=8),
    BlockType.IQ4_NL: CodeLayout(4, Codes.IQ4),
    BlockType.IQ4_XS: CodeLayout(4, Codes.IQ4, scales=Scales.INT8, run=8),
    BlockType.MXFP4: CodeLayout(4, Codes.E2M1, scales=Scales.E8M0),
}
"""Layouts of GGUF's blocks."""


def held_bytes(kind: BlockType, num_bytes: int) -> int:
    """Bytes that a weight of blocks takes on CUDA, whose file has ``num_bytes``: k-quants take a bit more."""
    values = num_bytes // kind.size.num_bytes * kind.size.num_values
    return round(values * BLOCK_LAYOUTS[kind].bits_per_weight / NUM_BITS)
