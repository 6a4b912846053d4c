"""Memory layouts of weights in integer codes: panels of 32 output features, one stream for a product.

A panel is a run of super-blocks of input features; a super-block is so many groups of 32. It holds the words
of its groups, then each group's own factors (bytes), then the numbers of the super-block. Within each of
these the 32 output features lie side by side. A weight is ``(code - offset) * scale + minimum``, where a
group's scale is the super-block's, times its own factor if it has one; so is its minimum.

The codes of a group and an output feature are as many words of 32 bits as a code has bits. A word is two
lanes of 16 bits, for the even and the odd one of two neighbouring input features, since the processor
multiplies pairs of 16-bit integers. A lane holds as many codes as fit, from its lowest bit on; bits that are
left over in all words hold the group's last codes, in pieces.

Codes that are floats are multiplied as floats: of a group they lie input feature by input feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.weights.block_codes import IQ4_VALUES, MXFP4_VALUES
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.quantization import GROUP, Quantization

LANE = 16
"""Bits of a lane."""


class Numbers(StrEnum):
    """How something of a group is held; values are parts of the names of kernels."""

    NONE = "none"
    OF_BLOCK = "block"
    """One number for the super-block."""
    UINT8 = "uint8"
    """A number for the super-block, times a factor of the group of this type."""
    INT8 = "int8"

    @property
    def is_factor(self) -> bool:
        return self in (Numbers.UINT8, Numbers.INT8)


class Table(StrEnum):
    """What codes stand for."""

    THEMSELVES = "codes"
    IQ4 = "iq4"
    MXFP4 = "mxfp4"
    E4M3 = "e4m3"
    """Floats of 8 bits, times 2^-8: the same bits, moved, are those of a float16."""
    HALF = "float16"

    @property
    def is_float(self) -> bool:
        return self in (Table.E4M3, Table.HALF)

    @property
    def values(self) -> tuple[int, ...]:
        """Integers by codes of 4 bits."""
        return IQ4_VALUES if self is Table.IQ4 else MXFP4_VALUES


class Piece(NamedTuple):
    """Neighbouring bits of a code, and where a lane has them."""

    word: int
    source: int
    width: int
    place: int
    """Lowest of these bits in the code."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a super-block of a panel holds."""

    bits: int
    """Bits of a code, which is not negative."""
    offset: int = 0
    """Subtracted from codes (with a table: from its values, to which it was added)."""
    table: Table = Table.THEMSELVES
    scales: Numbers = Numbers.OF_BLOCK
    minimums: Numbers = Numbers.NONE
    num_groups: int = 1
    """Groups of a super-block."""
    halves: int = 1
    """Equal parts of a group with scales of their own: 1 or 2."""
    is_float32: bool = False
    """Whether the super-block's numbers are float32, else float16."""

    @property
    def name(self) -> str:
        fields = self.bits, self.offset, self.table, self.scales, self.minimums, self.num_groups, self.halves
        return "-".join(map(str, (*fields, 32 if self.is_float32 else 16)))

    @property
    def feature_bytes(self) -> int:
        """Bytes of one input feature's codes, where they are floats."""
        return self.bits // 8 * PANEL

    @property
    def per_lane(self) -> int:
        """Whole codes of a lane."""
        return LANE // self.bits

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's words."""
        return self.bits * PANEL * 4

    @property
    def num_factors(self) -> int:
        """Factors of a group: its scales, then its minimum."""
        return self.halves * self.scales.is_factor + self.minimums.is_factor

    @property
    def factor_bytes(self) -> int:
        """Bytes of a group's factors."""
        return self.num_factors * PANEL

    @property
    def factors_offset(self) -> int:
        """Bytes from the beginning of a super-block to its first group's factors."""
        return self.num_groups * self.code_bytes

    @property
    def numbers_offset(self) -> int:
        """Bytes from the beginning of a super-block to its scales, which its minimums follow."""
        return self.factors_offset + self.num_groups * self.factor_bytes

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of all output features."""
        return PANEL * (4 if self.is_float32 else 2)

    @property
    def block_bytes(self) -> int:
        """Bytes of a super-block."""
        return self.numbers_offset + (1 + (self.minimums is not Numbers.NONE)) * self.number_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / (PANEL * GROUP * self.num_groups)

    def pieces(self, pair: int) -> tuple[Piece, ...]:
        """Where the codes of a pair of input features are, in both lanes alike."""
        per_lane, bits = self.per_lane, self.bits
        if pair < per_lane * bits:
            return (Piece(pair // per_lane, pair % per_lane * bits, bits, 0),)
        if bits == 5:
            return tuple(Piece(word, 15, 1, word) for word in range(5))
        rest = pair - per_lane * bits
        return Piece(rest, 12, 4, 0), Piece(4 + rest // 2, 12 + 2 * (rest % 2), 2, 4)


_NUMBERS = Numbers.OF_BLOCK
BYTES, NIBBLES = Layout(8, 128), Layout(4, minimums=_NUMBERS)
"""Layouts of weights that are quantised as they come."""

BLOCK_LAYOUTS: Mapping[BlockType, Layout] = {
    BlockType.Q4_0: Layout(4, 8),
    BlockType.Q4_1: NIBBLES,
    BlockType.Q5_0: Layout(5, 16),
    BlockType.Q5_1: Layout(5, minimums=_NUMBERS),
    BlockType.Q8_0: BYTES,
    BlockType.Q4_K: Layout(4, scales=Numbers.UINT8, minimums=Numbers.UINT8, num_groups=8),
    BlockType.Q5_K: Layout(5, scales=Numbers.UINT8, minimums=Numbers.UINT8, num_groups=8),
    BlockType.Q6_K: Layout(6, 32, scales=Numbers.INT8, num_groups=8, halves=2),
    BlockType.IQ4_NL: Layout(4, 128, Table.IQ4),
    BlockType.IQ4_XS: Layout(4, 128, Table.IQ4, scales=Numbers.INT8, num_groups=8),
    # A power of two, which float16 does not always hold.
    BlockType.MXFP4: Layout(4, 128, Table.MXFP4, is_float32=True),
}
"""Layouts that hold the blocks of GGUF files: the same codes and numbers."""


def made_layout(format: Quantization) -> Layout:
    """The layout of weights that are quantised as they come."""
    return BYTES if format is Quantization.INT8 else NIBBLES
