"""Unpacks weights as quantised checkpoints store them: codes ``[out_features, in_features]`` and scales.

Layouts are those of the libraries that write them: transformers (fp8), compressed-tensors, AutoGPTQ and
GPTQModel, AutoAWQ, ModelOpt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.engine.model.checkpoint.layer_formats import WHOLE_ROWS
from specray.engine.weights.grouped_weight import BYTE_BITS, NIBBLE_BITS, GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.quantization import GROUP, NVFP4_GROUP
from specray.engine.weights.reordered_weight import ReorderedWeight

_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places in a word of eight columns in a row; AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 in this order."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A weight of ``scale * (code - zero)``."""

    codes: Tensor  # float8, int8, or int32 without a sign [rows, columns]
    scale: Tensor  # [rows or 1, groups]
    zeros: Tensor | None  # whole numbers as the scales, or one for all; None: 0
    groups: Tensor  # int64 [columns], the group of each
    bits: int = BYTE_BITS

    def values(self) -> Tensor:
        """float32 ``[rows, columns]``."""
        codes = self.codes.float()
        if self.zeros is not None:
            zeros = self.zeros.float()
            codes = codes - (zeros if zeros.ndim < 2 else zeros[:, self.groups])
        return codes * self.scale.float()[:, self.groups]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def stored(self) -> GroupedWeight | ReorderedWeight:
        """The values in groups of one size; if groups are no runs of units, with columns in order."""
        _, counts = torch.unique_consecutive(self.groups, return_counts=True)
        # The last group may have fewer columns.
        size = math.gcd(*counts.tolist())
        if size % GROUP and not self.codes.is_floating_point():
            return ReorderedWeight.of(self._grouped(torch.arange(self.scale.shape[1])), self.groups)
        return self._grouped(self.groups[::size])

    def _grouped(self, index: Tensor) -> GroupedWeight:
        """The codes as they are, with the scales and zeros of some groups."""
        rows, num_groups = len(self.codes), self.scale.shape[1]
        scales = self.scale.expand(rows, num_groups)[:, index].contiguous()
        if self.codes.is_floating_point():
            return GroupedWeight(self.codes, scales)
        # Bytes have signs.
        shift = 1 << (BYTE_BITS - 1) if self.bits == BYTE_BITS and self.codes.dtype == torch.int32 else 0
        zeros = torch.zeros((), dtype=torch.int32) if self.zeros is None else self.zeros
        zeros = (zeros - shift).to(torch.int8).expand(rows, num_groups)[:, index].contiguous()
        return GroupedWeight(
            (self.codes - shift).to(torch.int8),
            scales,
            zeros if self.bits == NIBBLE_BITS or bool(zeros.any()) else None,
            self.bits,
        )


def scaled(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    block: tuple[int, int] | None,
    *,
    group_size: int | None = None,
) -> Unpacked:
    """Numbers of 8 bits, times the scale of their weight, row, group of columns or block.

    Args:
        weight: float8 or int8.
        scale: one number; ``[rows]``; ``[rows, groups of columns]``; or ``[blocks of rows, of columns]``.
        zero_point: of the scale's shape; None: zero.
        block: rows and columns of a block; the last one of either may be smaller. None: there are none.
        group_size: as of :func:`packed_rows`.

    Raises:
        ValueError: the scale's shape is none of these.
    """
    scales, groups = _by_row(scale, weight.shape, block, group_size)
    if zero_point is None:
        return Unpacked(weight, scales, None, groups)
    zeros, _ = _by_row(zero_point, weight.shape, block, group_size)
    if zeros.shape != scales.shape:
        raise ValueError(f"zero points of shape {list(zero_point.shape)}, scales of {list(scale.shape)}")
    return Unpacked(weight, scales, zeros, groups)


def packed_rows(
    packed: Tensor,
    shape: tuple[int, int],
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor | None,
    *,
    bits: int,
    group_size: int | None = None,
) -> Unpacked:
    """compressed-tensors' ``pack-quantized``: signed numbers plus half their range, packed along a row.

    Args:
        packed: int32 ``[rows, words]``.
        shape: of the weight.
        scale: ``[rows, groups of columns]``.
        zero_point: int32, packed along the rows ``[words, groups]``; None: zero.
        groups: group of each column; None: in their order, as where one of them is -1.
        group_size: columns of a group, of the last one maybe fewer, or ``WHOLE_ROWS``; None: as the scales'
            shape says.
    """
    rows, columns = shape
    if packed.shape != (rows, num_words := -(-columns * bits // _WORD_BITS)):
        raise ValueError(
            f"packed numbers of shape {list(packed.shape)} for a weight of {[rows, columns]} in {bits} bits; "
            f"allowed: {[rows, num_words]}"
        )
    codes = unpack(packed, bits)[:, :columns]
    offset = torch.full((), 1 << (bits - 1), dtype=torch.int32)
    zeros = offset if zero_point is None else unpack(zero_point.T.contiguous(), bits).T[:rows]
    if groups is not None and bool((groups == -1).any()):
        groups = None
    return _grouped(codes, scale, zeros, groups, group_size, bits)


def gptq(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    groups: Tensor | None,
    *,
    bits: int,
    zero_offset: int,
    group_size: int | None = None,
) -> Unpacked:
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
    return _grouped(codes, scale.T, zeros.T, groups, group_size, bits)


def awq(packed: Tensor, scale: Tensor, zero_point: Tensor, *, group_size: int | None = None) -> Unpacked:
    """AWQ: numbers of 4 bits; eight output features in a word, in an order of their own.

    Args:
        packed: int32 ``[in_features, out_features / 8]``.
        scale: ``[groups, out_features]``.
        zero_point: int32 ``[groups, out_features / 8]``.
        group_size: as of :func:`packed_rows`.
    """
    codes, zeros = (_in_order(unpack(words, 4)) for words in (packed, zero_point))
    return _grouped(codes.T, scale.T, zeros.T, None, group_size, NIBBLE_BITS)


def nvfp4(packed: Tensor, scale: Tensor, factor: Tensor | None, divisor: Tensor | None) -> Nvfp4Weight:
    """NVFP4: numbers of 4 bits with a scale of e4m3 for each 16 columns, and one number for the whole weight.

    Args:
        packed: uint8 ``[rows, columns / 2]``, the first number of a byte in its lower bits.
        scale: e4m3 ``[rows, columns / 16]``.
        factor: ModelOpt's number, by which values are multiplied; None: there is a divisor.
        divisor: compressed-tensors' number, by which they are divided.

    Raises:
        ValueError: shapes do not fit each other, or values are divided by zero.
    """
    rows, columns = len(packed), 2 * packed.shape[1]
    if scale.dtype != torch.float8_e4m3fn or scale.shape != (rows, columns // NVFP4_GROUP):
        raise ValueError(
            f"scales of shape {list(scale.shape)} and type {str(scale.dtype).removeprefix('torch.')} for a "
            f"weight of shape {[rows, columns]} in NVFP4; allowed: {[rows, columns // NVFP4_GROUP]} of e4m3"
        )
    number = factor if factor is not None else divisor
    if number is None or number.numel() != 1:
        raise ValueError("a weight in NVFP4 without one number of its own")
    outer = number.float().reshape(())
    if factor is None:
        if bool(outer == 0) and bool((scale.view(torch.uint8) & 0x7F).any()):
            raise ValueError("values in NVFP4 are divided by a weight_global_scale of 0")
        # What no data was seen of is all zeros, and so is its divisor.
        outer = torch.where(outer == 0, outer, 1.0 / outer)
    return Nvfp4Weight(packed, scale, outer.expand(rows).contiguous())


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of ``bits`` bits in int32 words, the lowest first, ``[rows, words * 32 / bits]``."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _in_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, len(_AWQ_ORDER))[..., list(_AWQ_ORDER)].flatten(-2)


def _grouped(
    codes: Tensor, scale: Tensor, zeros: Tensor, groups: Tensor | None, group_size: int | None, bits: int
) -> Unpacked:
    """Scales and zeros are ``[rows, groups]``; one zero may be for all."""
    rows, columns = codes.shape
    if len(scale) != rows or scale.ndim != 2 or (zeros.ndim == 2 and zeros.shape != scale.shape):
        raise ValueError(f"scales of shape {list(scale.shape)} for a weight of {rows} rows")
    if groups is None:
        groups = torch.arange(columns) // _group_columns(columns, scale.shape[1], group_size)
    elif groups.shape != (columns,) or not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
        raise ValueError(f"groups of columns that do not fit {scale.shape[1]} groups")
    return Unpacked(codes, scale, zeros, groups.long(), bits)


def _by_row(
    values: Tensor, shape: torch.Size, block: tuple[int, int] | None, group_size: int | None
) -> tuple[Tensor, Tensor]:
    """Numbers ``[rows or 1, groups]``, and the group of each column."""
    rows, columns = shape
    if block is not None:
        if values.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return values.repeat_interleave(block[0], 0)[:rows], torch.arange(columns) // block[1]
    elif values.numel() == 1:
        return values.reshape(1, 1), torch.zeros(columns, dtype=torch.int64)
    elif values.shape == (rows,):
        return values[:, None], torch.zeros(columns, dtype=torch.int64)
    elif values.ndim == 2 and len(values) == rows:
        return values, torch.arange(columns) // _group_columns(columns, values.shape[1], group_size)
    raise ValueError(f"scales of shape {list(values.shape)} for a weight of shape {[rows, columns]}")


def _group_columns(columns: int, num_groups: int, group_size: int | None) -> int:
    """Columns of each group but the last, which may have fewer.

    Without a size they are equal, and a power of two, or else they could be whole groups and a shorter last
    one.
    """
    size = columns // num_groups if group_size is None else group_size
    if group_size == WHOLE_ROWS:
        size = columns
    is_open = group_size is None and num_groups > 1
    if is_open and (columns % num_groups or size & (size - 1)):
        raise ValueError(
            f"{num_groups} groups for {columns} columns, and no size of them; allowed: equal ones of a power "
            "of two"
        )
    if -(-columns // size) != num_groups:
        raise ValueError(f"{num_groups} groups for {columns} columns; allowed: groups of {size}")
    return size
