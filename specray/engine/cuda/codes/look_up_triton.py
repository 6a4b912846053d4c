"""Some output features of a weight in codes as numbers, as a Triton kernel: look-ups of an embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specray.engine.cuda.codes.packed import PackedWeight
from specray.engine.cuda.codes.unit_triton import constants_of, load_codes, load_scales, pointers_of

_ROWS = 16
"""Output features of a program."""


@triton.jit(do_not_specialize=["num_indices"])
def _look_up(
    indices, out, codes, words, factors, numbers, zeros, outer, order, num_indices, size, in_features,
    BITS: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    MINIMUMS: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr, NUM_FACTORS: tl.constexpr,
    NUM_NUMBERS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_ORDER: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_indices
    unit = tl.program_id(1)
    inner = tl.arange(0, 16)
    column = tl.load(indices + row, mask=is_row, other=0)
    low, high = load_codes(
        codes, words, zeros, unit, column, is_row, size, tl.float32, BITS, CODES, OFFSET, HAS_ZEROS, RUN
    )
    low_scale, high_scale, minimum = load_scales(
        factors, numbers, unit, column, is_row, size, SCALES, MINIMUMS, HALVES, RUN, NUM_FACTORS, NUM_NUMBERS
    )
    if SCALES != 0:
        low = low * low_scale[None, :]
        high = high * high_scale[None, :]
    if MINIMUMS != 0:
        low = low + minimum[None, :]
        high = high + minimum[None, :]
    if HAS_OUTER:
        factor = tl.load(outer + column, mask=is_row, other=0.0)
        low = low * factor[None, :]
        high = high * factor[None, :]
    place = unit * 32 + inner
    next_place = place + 16
    is_feature = place >= 0
    is_next = is_feature
    if HAS_ORDER:
        place = tl.load(order + place)
        next_place = tl.load(order + next_place)
        is_feature = place >= 0
        is_next = next_place >= 0
    start = out + row.to(tl.int64)[None, :] * in_features
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(start + place[:, None], low.to(kind), mask=is_row[None, :] & is_feature[:, None])
    tl.store(start + next_place[:, None], high.to(kind), mask=is_row[None, :] & is_next[:, None])


def look_up(weight: PackedWeight, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some output features, ``[*indices.shape, in_features]``: their values in float32, rounded to ``dtype``.

    Args:
        indices: of the output features, integers.
    """
    flat = indices.reshape(-1).contiguous()
    out = torch.empty(len(flat), weight.in_features, dtype=dtype, device=flat.device)
    if len(flat):
        _look_up[(triton.cdiv(len(flat), _ROWS), weight.num_units)](
            flat, out, *pointers_of(weight), len(flat), weight.size, weight.in_features,
            **constants_of(weight), ROWS=_ROWS, num_warps=1,
        )  # fmt: skip
    return out.view(*indices.shape, weight.in_features)


@dataclass(frozen=True, slots=True)
class CodeEmbedding:
    """Implements ``decoder.Embedding``: look-ups in a table that a head may share."""

    table: PackedWeight
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return look_up(self.table, token_ids, self.dtype)
