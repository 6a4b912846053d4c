"""Dequantises weights as quantised checkpoints store them, to float32 ``[out_features, in_features]``.

Layouts are those of the libraries that write them: transformers (fp8), compressed-tensors, AutoGPTQ and
GPTQModel, AutoAWQ, ModelOpt.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places in a word of eight columns in a row; AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 in this order."""


def scaled(weight: Tensor, scale: Tensor, zero_point: Tensor | None, block: tuple[int, int] | None) -> Tensor:
    """Numbers of 8 bits, times the scale of their weight, row, group of columns or block.

    Args:
        weight: float8 or int8.
        scale: one number; ``[rows]``; ``[rows, groups of columns]``; or ``[blocks of rows, of columns]``.
        zero_point: of the scale's shape; None: zero.
        block: rows and columns of a block; the last one of either may be smaller.

    Raises:
        ValueError: the scale's shape is none of these.
    """
    numbers = weight.float()
    scales = _spread(scale.float(), weight.shape, block)
    if zero_point is not None:
        numbers = numbers - _spread(zero_point.float(), weight.shape, block)
    return numbers * scales


def packed_rows(
    packed: Tensor,
    shape: tuple[int, int],
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor | None,
    *,
    group_size: int | None = None,
) -> Tensor:
    """compressed-tensors' ``pack-quantized``: signed numbers plus half their range, packed along a row.

    Args:
        packed: int32 ``[rows, words]``.
        shape: of the weight.
        scale: ``[rows, groups of columns]``.
        zero_point: int32, packed along the rows ``[words, groups]``; None: zero.
        groups: group of each column; None: in their order.
        group_size: columns of a group, of the last one maybe fewer; None: as the scales' shape says.
    """
    rows, columns = shape
    num_bits = _bits(packed.shape[1], columns)
    codes = unpack(packed, num_bits)[:, :columns]
    offset = torch.full((), 1 << (num_bits - 1), dtype=torch.int32)
    zeros = offset if zero_point is None else unpack(zero_point.T.contiguous(), num_bits).T[:rows]
    return _grouped(codes, scale, zeros, groups, group_size)


def gptq(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    groups: Tensor | None,
    *,
    bits: int,
    zero_offset: int,
    group_size: int | None = None,
) -> Tensor:
    """GPTQ: columns of the weight packed along a column of ``qweight``.

    Args:
        packed: int32 ``[in_features * bits / 32, out_features]``.
        scale: ``[groups, out_features]``.
        zero_point: int32 ``[groups, out_features * bits / 32]``.
        groups: group of each input feature; None: in their order.
        zero_offset: added to zero points, within their range.
        group_size: as of :func:`packed_rows`.
    """
    codes = unpack(packed.T.contiguous(), bits)
    zeros = (unpack(zero_point, bits) + zero_offset) & ((1 << bits) - 1)
    return _grouped(codes, scale.T, zeros.T, groups, group_size)


def awq(packed: Tensor, scale: Tensor, zero_point: Tensor, *, group_size: int | None = None) -> Tensor:
    """AWQ: numbers of 4 bits; eight output features in a word, in an order of their own.

    Args:
        packed: int32 ``[in_features, out_features / 8]``.
        scale: ``[groups, out_features]``.
        zero_point: int32 ``[groups, out_features / 8]``.
        group_size: as of :func:`packed_rows`.
    """
    codes, zeros = (_in_order(unpack(words, 4)) for words in (packed, zero_point))
    return _grouped(codes.T, scale.T, zeros.T, None, group_size)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of ``bits`` bits in int32 words, the lowest first, ``[rows, words * 32 / bits]``."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _in_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, len(_AWQ_ORDER))[..., list(_AWQ_ORDER)].flatten(-2)


def _grouped(
    codes: Tensor, scale: Tensor, zeros: Tensor, groups: Tensor | None, group_size: int | None
) -> Tensor:
    """``scale * (code - zero)``, with scales and zeros ``[rows, groups]``; one zero may be for all."""
    rows, columns = codes.shape
    if len(scale) != rows or scale.ndim != 2 or (zeros.ndim == 2 and zeros.shape != scale.shape):
        raise ValueError(f"scales of shape {list(scale.shape)} for a weight of {rows} rows")
    if groups is None:
        if group_size is None or -(-columns // group_size) != scale.shape[1]:
            # Whole rows, or a layer that has groups of its own.
            group_size = _equal_groups(columns, scale.shape[1])
        groups = torch.arange(columns) // group_size
    elif groups.shape != (columns,) or not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
        raise ValueError(f"groups of columns that do not fit {scale.shape[1]} groups")
    index = groups.long()
    return (codes - (zeros[:, index] if zeros.ndim == 2 else zeros)).float() * scale.float()[:, index]


def _spread(values: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Scales or zero points in a shape that fits the weight's."""
    rows, columns = shape
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim == 2 and len(values) == rows and columns % values.shape[1] == 0:
        return values.repeat_interleave(_equal_groups(columns, values.shape[1]), 1)
    if block is not None and values.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return values.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    raise ValueError(f"scales of shape {list(values.shape)} for a weight of shape {[rows, columns]}")


def _equal_groups(columns: int, num_groups: int) -> int:
    """Columns of each group: a power of two, or else they could be whole groups and a shorter last one."""
    size = columns // num_groups
    if columns % num_groups or (num_groups > 1 and size & (size - 1)):
        raise ValueError(f"{num_groups} groups for {columns} columns")
    return size


def _bits(num_words: int, num_values: int) -> int:
    bits = {width for width in (4, 8) if -(-num_values * width // _WORD_BITS) == num_words}
    if len(bits) != 1:
        raise ValueError(f"{num_words} words for {num_values} numbers; allowed: numbers of 4 or 8 bits")
    return bits.pop()
