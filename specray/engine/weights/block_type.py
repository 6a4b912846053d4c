"""Types of blocks in which GGUF files hold weights; importing it needs neither torch nor a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BlockType(StrEnum):
    """GGML's types of weights with values in blocks; the values are GGML's names."""

    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    MXFP4 = "mxfp4"

    @property
    def size(self) -> BlockSize:
        return _SIZES[self]

    def row_bytes(self, in_features: int) -> int:
        """Bytes of the blocks of one output feature."""
        return in_features // self.size.num_values * self.size.num_bytes


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What a block holds."""

    num_values: int
    """Input features, side by side."""
    num_bytes: int
    group: int
    """Input features that share one scale."""
    number: int
    """Number of the type in a GGUF file."""


_SIZES = {
    BlockType.Q4_0: BlockSize(32, 18, 32, 2),
    BlockType.Q4_1: BlockSize(32, 20, 32, 3),
    BlockType.Q5_0: BlockSize(32, 22, 32, 6),
    BlockType.Q5_1: BlockSize(32, 24, 32, 7),
    BlockType.Q8_0: BlockSize(32, 34, 32, 8),
    BlockType.Q4_K: BlockSize(256, 144, 32, 12),
    BlockType.Q5_K: BlockSize(256, 176, 32, 13),
    BlockType.Q6_K: BlockSize(256, 210, 16, 14),
    BlockType.IQ4_NL: BlockSize(32, 18, 32, 20),
    BlockType.IQ4_XS: BlockSize(256, 136, 32, 23),
    BlockType.MXFP4: BlockSize(32, 17, 32, 39),
}


def numbered_type(number: int) -> BlockType | None:
    """The type of this number in a GGUF file; None: plain numbers, or a type that is not read."""
    return next((kind for kind, size in _SIZES.items() if size.number == number), None)
