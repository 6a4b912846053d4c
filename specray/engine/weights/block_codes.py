"""Decodes blocks into integer codes, scales and minimums: ``code * scale + minimum`` is the file's value.

Products of codes and scales are exact in float32 (at most 24 bits), so the sum rounds once, and values equal
those of GGML's own float32 dequantisation bit for bit. Layouts: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.engine.weights.block_type import BlockType

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the codes of MXFP4."""
_MXFP4_BIAS = 128
"""Exponent of a scale's byte that stands for one, when codes are doubled."""


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Some rows of a weight, decoded."""

    codes: Tensor  # int8 [rows, in_features], values of the type's table looked up
    scales: Tensor  # float32 [rows, in_features / group]
    minimums: Tensor | None  # float32, as the scales; None: zero

    def values(self) -> Tensor:
        """float32 ``[rows, in_features]``."""
        grouped = self.codes.view(*self.scales.shape, -1).float() * self.scales[..., None]
        if self.minimums is not None:
            grouped += self.minimums[..., None]
        return grouped.view(self.codes.shape)


def decode(kind: BlockType, rows: Tensor) -> BlockCodes:
    """Decodes whole rows of blocks, uint8 ``[rows, row_bytes]``."""
    blocks = rows.view(len(rows), -1, kind.size.num_bytes)
    codes, scales, minimums = _DECODERS[kind](blocks)
    return BlockCodes(
        codes.to(torch.int8).reshape(len(rows), -1),
        scales.reshape(len(rows), -1),
        None if minimums is None else minimums.reshape(len(rows), -1),
    )


_Decoded = tuple[Tensor, Tensor, Tensor | None]


def halves(blocks: Tensor, start: int) -> Tensor:
    """A float16 of each block as float32, ``[..., 1]``."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves, as int16 ``[..., 2 * bytes]``."""
    return torch.cat((packed & 15, packed >> 4), -1).to(torch.int16)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The fifth bits of 32 codes from four bytes, in place, int16 ``[..., 32]``."""
    words = blocks[..., start : start + 4]
    bits = (words[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2).to(torch.int16) << 4


def _q4_0(blocks: Tensor) -> _Decoded:
    return _nibbles(blocks[..., 2:]) - 8, halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Decoded:
    return _nibbles(blocks[..., 4:]), halves(blocks, 0), halves(blocks, 2)


def _q5_0(blocks: Tensor) -> _Decoded:
    return (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)) - 16, halves(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Decoded:
    return _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), halves(blocks, 0), halves(blocks, 2)


def _q8_0(blocks: Tensor) -> _Decoded:
    return blocks[..., 2:].contiguous().view(torch.int8), halves(blocks, 0), None


def _iq4_nl(blocks: Tensor) -> _Decoded:
    return torch.tensor(IQ4_VALUES)[_nibbles(blocks[..., 2:]).long()], halves(blocks, 0), None


def _mxfp4(blocks: Tensor) -> _Decoded:
    codes = torch.tensor(MXFP4_VALUES)[_nibbles(blocks[..., 1:]).long()]
    exponents = blocks[..., :1].to(torch.int32) - _MXFP4_BIAS
    return codes, torch.ldexp(torch.ones(exponents.shape), exponents), None


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 6 bits from 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    minimums = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return scales, minimums


def _two_levels(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the eight groups of a block of Q4_K or Q5_K."""
    scales, minimums = six_bit_scales(blocks[..., 4:16])
    return halves(blocks, 0) * scales.float(), -(halves(blocks, 2) * minimums.float())


def _split(packed: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _by_groups(packed: Tensor) -> Tensor:
    """Codes of 4 bits, ``[..., 8, 32]``: of 32 bytes the low halves, then the high ones."""
    return _nibbles(_split(packed, 4, 32)).view(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: Tensor) -> _Decoded:
    return _by_groups(blocks[..., 16:]), *_two_levels(blocks)


def _q5_k(blocks: Tensor) -> _Decoded:
    planes = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (planes & 1).to(torch.int16) << 4
    return _by_groups(blocks[..., 48:]) | fifth, *_two_levels(blocks)


def _q6_k(blocks: Tensor) -> _Decoded:
    low = _split(blocks[..., :128], 2, 64)
    high = _split(blocks[..., 128:192], 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = ((high >> shifts) & 3).to(torch.int16) << 4
    codes = (_split(_nibbles(low), 4, 32) | upper) - 32
    return codes, halves(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8).float(), None


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """The eight scales of 6 bits of a block of IQ4_XS, -32..31, int32."""
    high = blocks[..., 2:4].contiguous().view(torch.int16).int()
    upper = ((high >> torch.arange(0, 16, 2)) & 3) << 4
    low = blocks[..., 4:8, None] >> torch.tensor((0, 4), dtype=torch.uint8)
    return ((low & 15).flatten(-2).int() | upper) - 32


def _iq4_xs(blocks: Tensor) -> _Decoded:
    codes = torch.tensor(IQ4_VALUES)[_nibbles(_split(blocks[..., 8:], 8, 16)).long()]
    return codes, halves(blocks, 0) * iq4_xs_scales(blocks).float(), None


_DECODERS: Mapping[BlockType, Callable[[Tensor], _Decoded]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.IQ4_NL: _iq4_nl,
    BlockType.IQ4_XS: _iq4_xs,
    BlockType.MXFP4: _mxfp4,
}
