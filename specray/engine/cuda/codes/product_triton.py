"""Products of 16- and 32-bit rows with weights in codes: one Triton kernel for every layout.

A program takes some rows and output features through all input features. Codes become exact numbers of the
rows' type and are multiplied as they are; a unit's sums are scaled in float32 before they are added up. So no
value of a weight is ever rounded, and none is anywhere but in registers: a larger step has larger tiles.
Nothing is split, and the units of a step of the loop are the layer's, so a row's sum has one order whatever
the rows beside it.

Rows may be those of experts, by an ``align.Alignment``: a tile has one expert and some of its pairs.
Importing it needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.cuda.align import Alignment
from specray.engine.cuda.codes.packed import PackedWeight
from specray.engine.cuda.codes.unit_triton import constants_of, load_codes, load_scales, pointers_of
from specray.engine.cuda.epilogue import NO_EPILOGUE, Epilogue
from specray.engine.cuda.epilogue_triton import joined
from specray.engine.cuda.tiles import FREE, TileRule, grouped_tile, units_at_once


@triton.jit
def _finished(
    total, outer, bias, column, is_column, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Sums with the factors and the bias of their output features."""
    if HAS_OUTER:
        total = total * tl.load(outer + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        total = total + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _load_rows(
    rows, order, unit, row_start, is_row, DTYPE: tl.constexpr, HAS_ORDER: tl.constexpr
):  # fmt: skip
    """A unit's input features of some rows, both halves: ``[rows, 16]`` each."""
    place = unit * 32 + tl.arange(0, 16)
    is_low = is_row[:, None]
    is_high = is_row[:, None]
    if HAS_ORDER:
        low_place = tl.load(order + place)
        high_place = tl.load(order + place + 16)
        is_low = is_low & (low_place >= 0)[None, :]
        is_high = is_high & (high_place >= 0)[None, :]
    else:
        low_place = place
        high_place = place + 16
    low = tl.load(rows + row_start[:, None] + low_place[None, :], mask=is_low, other=0.0)
    high = tl.load(rows + row_start[:, None] + high_place[None, :], mask=is_high, other=0.0)
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _accumulate(
    rows, row_start, is_row, codes, words, factors, numbers, zeros, order, column, is_column, size, num_units,
    DTYPE: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    MINIMUMS: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr, NUM_FACTORS: tl.constexpr,
    NUM_NUMBERS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of a tile, float32 ``[ROWS, COLUMNS]``, without the output features' factors."""
    # With one scale for a whole step its units are added up first.
    is_wide: tl.constexpr = SCALES <= 1 and MINIMUMS == 0 and RUN % STEP == 0
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_units, STEP):
        part = tl.zeros([ROWS, COLUMNS], tl.float32)
        for index in tl.static_range(STEP):
            unit = first + index
            low, high = load_codes(
                codes, words, zeros, unit, column, is_column, size, DTYPE, BITS, CODES, OFFSET, HAS_ZEROS, RUN
            )
            low_rows, high_rows = _load_rows(rows, order, unit, row_start, is_row, DTYPE, HAS_ORDER)
            if is_wide:
                part = tl.dot(low_rows, low, part, input_precision="ieee")
                part = tl.dot(high_rows, high, part, input_precision="ieee")
            else:
                low_scale, high_scale, minimum = load_scales(
                    factors, numbers, unit, column, is_column, size,
                    SCALES, MINIMUMS, HALVES, RUN, NUM_FACTORS, NUM_NUMBERS,
                )  # fmt: skip
                if HALVES == 2:
                    total += tl.dot(low_rows, low, input_precision="ieee") * low_scale[None, :]
                    total += tl.dot(high_rows, high, input_precision="ieee") * high_scale[None, :]
                else:
                    part = tl.dot(low_rows, low, input_precision="ieee")
                    part = tl.dot(high_rows, high, part, input_precision="ieee")
                    total += part * low_scale[None, :]
                if MINIMUMS != 0:
                    sums = tl.sum(low_rows.to(tl.float32), 1) + tl.sum(high_rows.to(tl.float32), 1)
                    total += sums[:, None] * minimum[None, :]
        if is_wide:
            if SCALES == 1:
                scale, _, _ = load_scales(
                    factors, numbers, first, column, is_column, size,
                    SCALES, MINIMUMS, HALVES, RUN, NUM_FACTORS, NUM_NUMBERS,
                )  # fmt: skip
                total += part * scale[None, :]
            else:
                total += part
    return total


# Steps differ in it: it must not make another variant to compile, which may add up in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    rows, out, bias, summand, pairs, experts, num_used, codes, words, factors, numbers, zeros, outer, order,
    num_rows, row_stride, out_stride, summand_stride, num_units, num_columns,
    PAIRS_PER_ROW: tl.constexpr, IS_GROUPED: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SUMMAND: tl.constexpr, HAS_TANH: tl.constexpr,
    HAS_CLAMP: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr,
    BITS: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    MINIMUMS: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr, NUM_FACTORS: tl.constexpr,
    NUM_NUMBERS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OUTER: tl.constexpr, HAS_ORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    is_used = tile >= 0
    expert = tile.to(tl.int64)
    if IS_GROUPED:
        expert = tl.load(experts + tile).to(tl.int64)
        is_used = (tile < tl.load(num_used)) & (expert >= 0)
    if is_used:
        layers: tl.constexpr = 2 if IS_GATED else 1
        size = layers * num_columns
        row = tile * ROWS + tl.arange(0, ROWS)
        if IS_GROUPED:
            row = tl.load(pairs + row)
            unit_bytes: tl.constexpr = 32 if BITS == 8 else 16
            num_words: tl.constexpr = BITS - 4 if BITS < 8 else 0
            codes += expert * (num_units * size * unit_bytes)
            words += expert * (num_units * size * num_words)
            factors += expert * (num_units * size * NUM_FACTORS)
            numbers += expert * (num_units // RUN * size * NUM_NUMBERS)
            zeros += expert * (num_units // RUN * size)
            outer += expert * size
            bias += expert * size
            if HAS_ORDER:
                order += expert * (num_units * 32)
        is_row = row < num_rows
        row = row.to(tl.int64)
        row_start = (row // PAIRS_PER_ROW) * row_stride
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        dtype: tl.constexpr = rows.dtype.element_ty
        first = _accumulate(
            rows, row_start, is_row, codes, words, factors, numbers, zeros, order, column, is_column, size,
            num_units, dtype, BITS, CODES, OFFSET, SCALES, MINIMUMS, HALVES, RUN, NUM_FACTORS, NUM_NUMBERS,
            HAS_ZEROS, HAS_ORDER, ROWS, COLUMNS, STEP,
        )  # fmt: skip
        first = _finished(first, outer, bias, column, is_column, HAS_OUTER, HAS_BIAS)
        if IS_GATED:
            second = _accumulate(
                rows, row_start, is_row, codes, words, factors, numbers, zeros, order, column + num_columns,
                is_column, size, num_units, dtype, BITS, CODES, OFFSET, SCALES, MINIMUMS, HALVES, RUN,
                NUM_FACTORS, NUM_NUMBERS, HAS_ZEROS, HAS_ORDER, ROWS, COLUMNS, STEP,
            )  # fmt: skip
            second = _finished(second, outer, bias, column + num_columns, is_column, HAS_OUTER, HAS_BIAS)
            first = joined(first, second, HAS_TANH, HAS_CLAMP, GAIN, LIMIT)
        is_out = is_row[:, None] & is_column[None, :]
        if HAS_SUMMAND:
            added = tl.load(summand + row[:, None] * summand_stride + column[None, :], mask=is_out, other=0.0)
            first += added.to(tl.float32)
        place = out + row[:, None] * out_stride + column[None, :]
        tl.store(place, first.to(out.dtype.element_ty), mask=is_out)


def multiply(
    rows: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    tiles: Alignment | None = None,
    rule: TileRule = FREE,
) -> torch.Tensor:
    """Writes ``rows @ weight.T`` and what follows it to ``out``, and returns it.

    Args:
        rows: float16, bfloat16 or float32 ``[num_rows, in_features]``, numbers of a row side by side.
        weight: of one layer, or with ``tiles`` of all experts.
        out: ``[num_rows, size]`` or ``[num_pairs, size]``, numbers of a row side by side.
        tiles: pair ``i`` has row ``i // (num_pairs / num_rows)``; tiles of an expert below zero are left out;
            None: every row has the one weight.
    """
    num_out, size = out.shape
    if num_out == 0:
        return out
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    tile = rule.tile(num_out, size) if tiles is None else grouped_tile(tiles.tile_rows)
    num_tiles = triton.cdiv(num_out, tile.rows) if tiles is None else tiles.num_tiles
    summand = epilogue.summand
    _product[(num_tiles, triton.cdiv(size, tile.columns))](
        rows,
        out,
        rows if epilogue.bias is None else epilogue.bias,
        rows if summand is None else summand,
        rows if tiles is None else tiles.pairs,
        rows if tiles is None else tiles.experts,
        rows if tiles is None else tiles.num_used,
        *pointers_of(weight),
        num_out,
        rows.stride(0),
        out.stride(0),
        0 if summand is None else summand.stride(0),
        weight.num_units,
        size,
        PAIRS_PER_ROW=num_out // len(rows),
        IS_GROUPED=tiles is not None,
        **epilogue.constants(),
        **constants_of(weight),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=units_at_once(weight.num_units),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
