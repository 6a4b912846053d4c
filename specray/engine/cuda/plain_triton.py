"""Products of rows with plain weights in one tile for any number of rows, as a Triton kernel.

Torch's own products are faster, and choose their kernel, with its order of adding up, by the number of rows.
Importing it needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.activation import Activation, Clamp
from specray.engine.cuda.epilogue import NO_EPILOGUE, Epilogue, PlainWeight
from specray.engine.cuda.grouped_triton import depth_of, joined
from specray.engine.cuda.tiles import FIXED, TileRule


@triton.jit
def _accumulate(
    rows, row_start, is_row, weight, column, is_column, in_features,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    depth = tl.arange(0, DEPTH)
    own_rows = rows + row_start[:, None] + depth[None, :]
    own_weight = weight + column[None, :].to(tl.int64) * in_features + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_features, DEPTH):
        is_feature = start + depth < in_features
        some = tl.load(own_rows + start, mask=is_row[:, None] & is_feature[None, :], other=0.0)
        numbers = tl.load(own_weight + start, mask=is_column[None, :] & is_feature[:, None], other=0.0)
        total = tl.dot(some, numbers, total, input_precision="ieee")
    return total


# Steps differ in it: it must not make another variant to compile, which may add up in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    rows, weight, bias, summand, out, num_rows, row_stride, out_stride, summand_stride, size, in_features,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SUMMAND: tl.constexpr, HAS_TANH: tl.constexpr, HAS_CLAMP: tl.constexpr, GAIN: tl.constexpr,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    row = row.to(tl.int64)
    row_start = row * row_stride
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    first = _accumulate(rows, row_start, is_row, weight, column, is_column, in_features, ROWS, COLUMNS, DEPTH)
    if HAS_BIAS:
        first += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        second = _accumulate(
            rows, row_start, is_row, weight, column + size, is_column, in_features, ROWS, COLUMNS, DEPTH
        )
        if HAS_BIAS:
            second += tl.load(bias + size + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        first = joined(first, second, HAS_TANH, HAS_CLAMP, GAIN, LIMIT)
    is_out = is_row[:, None] & is_column[None, :]
    if HAS_SUMMAND:
        place = summand + row[:, None] * summand_stride + column[None, :]
        first += tl.load(place, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * out_stride + column[None, :], first.to(out.dtype.element_ty), mask=is_out)


def multiply_plain(
    rows: torch.Tensor,
    weight: PlainWeight,
    out: torch.Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    rule: TileRule = FIXED,
) -> torch.Tensor:
    """Writes ``rows @ weight.T`` and what follows it to ``out``, and returns it.

    Args:
        rows: ``[num_rows, in_features]`` of the weight's type, numbers of a row side by side.
        out: ``[num_rows, size]``, of a gated pair half as wide.
    """
    num_rows, size = out.shape
    if num_rows == 0:
        return out
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    tile = rule.tile(num_rows, size)
    summand, joint = epilogue.summand, epilogue.joint
    clamp = joint if isinstance(joint, Clamp) else None
    _product[(triton.cdiv(num_rows, tile.rows), triton.cdiv(size, tile.columns))](
        rows,
        weight.numbers,
        rows if epilogue.bias is None else epilogue.bias,
        rows if summand is None else summand,
        out,
        num_rows,
        rows.stride(0),
        out.stride(0),
        0 if summand is None else summand.stride(0),
        size,
        weight.in_features,
        IS_GATED=joint is not None,
        HAS_BIAS=epilogue.bias is not None,
        HAS_SUMMAND=summand is not None,
        HAS_TANH=joint is Activation.GELU_TANH,
        HAS_CLAMP=clamp is not None,
        GAIN=0.0 if clamp is None else clamp.gain,
        LIMIT=0.0 if clamp is None else clamp.limit,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=min(64 if rows.dtype == torch.float32 else 128, depth_of(weight.in_features)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
