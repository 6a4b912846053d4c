"""Products of 16- and 32-bit rows with plain weights, as a Triton kernel.

A dense layer has one tile for any number of rows: torch's own products are faster, and choose their kernel,
with its order of adding up, by the number of rows. Rows may be those of experts, by an ``align.Alignment``: a
tile has one expert and some of its pairs. Importing it needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.cuda.align import Alignment
from specray.engine.cuda.epilogue import NO_EPILOGUE, Epilogue, PlainWeight
from specray.engine.cuda.epilogue_triton import joined
from specray.engine.cuda.tiles import FIXED, TileRule, depth_of, grouped_tile


# Steps differ in it: it must not make another variant to compile, which may add up in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    rows, weight, bias, summand, out, pairs, experts, num_used, num_rows, row_stride, out_stride,
    summand_stride, size, in_features, PAIRS_PER_ROW: tl.constexpr, IS_GROUPED: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SUMMAND: tl.constexpr, HAS_TANH: tl.constexpr, HAS_CLAMP: tl.constexpr, GAIN: tl.constexpr,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    is_used = tile >= 0
    expert = tile.to(tl.int64)
    if IS_GROUPED:
        expert = tl.load(experts + tile).to(tl.int64)
        is_used = (tile < tl.load(num_used)) & (expert >= 0)
    if is_used:
        row = tile * ROWS + tl.arange(0, ROWS)
        if IS_GROUPED:
            layers: tl.constexpr = 2 if IS_GATED else 1
            row = tl.load(pairs + row)
            weight += expert * layers * size * in_features
            bias += expert * layers * size
        is_row = row < num_rows
        row = row.to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < size
        depth = tl.arange(0, DEPTH)
        own_rows = rows + ((row // PAIRS_PER_ROW) * row_stride)[:, None] + depth[None, :]
        own_weight = weight + column[None, :].to(tl.int64) * in_features + depth[:, None]
        up_weight = weight + (column + size)[None, :].to(tl.int64) * in_features + depth[:, None]
        first = tl.zeros([ROWS, COLUMNS], tl.float32)
        second = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, in_features, DEPTH):
            is_feature = start + depth < in_features
            some = tl.load(own_rows + start, mask=is_row[:, None] & is_feature[None, :], other=0.0)
            is_weight = is_column[None, :] & is_feature[:, None]
            numbers = tl.load(own_weight + start, mask=is_weight, other=0.0)
            # Products of float32 are whole ones, not those of its upper 19 bits.
            first = tl.dot(some, numbers, first, input_precision="ieee")
            if IS_GATED:
                others = tl.load(up_weight + start, mask=is_weight, other=0.0)
                second = tl.dot(some, others, second, input_precision="ieee")
        if HAS_BIAS:
            first += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            if HAS_BIAS:
                second += tl.load(bias + size + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            first = joined(first, second, HAS_TANH, HAS_CLAMP, GAIN, LIMIT)
        is_out = is_row[:, None] & is_column[None, :]
        if HAS_SUMMAND:
            place = summand + row[:, None] * summand_stride + column[None, :]
            first += tl.load(place, mask=is_out, other=0.0).to(tl.float32)
        place = out + row[:, None] * out_stride + column[None, :]
        tl.store(place, first.to(out.dtype.element_ty), mask=is_out)


def multiply_plain(
    rows: torch.Tensor,
    weight: PlainWeight,
    out: torch.Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    tiles: Alignment | None = None,
    rule: TileRule = FIXED,
) -> torch.Tensor:
    """Writes ``rows @ weight.T`` and what follows it to ``out``, and returns it.

    Args:
        rows: ``[num_rows, in_features]`` of the weight's type, numbers of a row side by side.
        weight: of one layer, or with ``tiles`` of all experts.
        out: ``[num_rows, size]`` or ``[num_pairs, size]``, of a gated pair half as wide.
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
        weight.numbers,
        rows if epilogue.bias is None else epilogue.bias,
        rows if summand is None else summand,
        out,
        rows if tiles is None else tiles.pairs,
        rows if tiles is None else tiles.experts,
        rows if tiles is None else tiles.num_used,
        num_out,
        rows.stride(0),
        out.stride(0),
        0 if summand is None else summand.stride(0),
        size,
        weight.in_features,
        PAIRS_PER_ROW=num_out // len(rows),
        IS_GROUPED=tiles is not None,
        **epilogue.constants(),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=depth_of(weight.in_features, rows.itemsize),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
