"""Norms and rotates queries and keys and writes the cache, as one Triton kernel. Importing it needs triton.

A captured forward of few rows still pays some microseconds for every operator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.attention.base import HeadNorm


@triton.jit
def _store(
    heads, layer, query, slots, cos, sin, norm_weight, eps, row_stride, slot_stride, HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    source = heads + row * row_stride + head * HEAD_DIM
    numbers = tl.load(source + dim, mask=is_dim, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        half: tl.constexpr = HEAD_DIM // 2
        partner = tl.where(dim < half, dim + half, dim - half)
        others = tl.load(source + partner, mask=is_dim, other=0.0)
        if HAS_NORM:
            # Rounded where the operators of a head norm round.
            wide = numbers.to(tl.float32)
            factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / HEAD_DIM + eps)
            own_weight = tl.load(norm_weight + head * HEAD_DIM + dim, mask=is_dim, other=0.0)
            other_weight = tl.load(norm_weight + head * HEAD_DIM + partner, mask=is_dim, other=0.0)
            numbers = (wide * factor).to(norm_weight.dtype.element_ty) * own_weight
            others = (others.to(tl.float32) * factor).to(norm_weight.dtype.element_ty) * other_weight
        cosine = tl.load(cos + row * HEAD_DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * HEAD_DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
        rotated = numbers.to(tl.float32) * cosine + others.to(tl.float32) * sine
        numbers = rotated.to(heads.dtype.element_ty)
    if head < NUM_HEADS:
        tl.store(query + (row * NUM_HEADS + head) * HEAD_DIM + dim, numbers, mask=is_dim)
    else:
        slot = tl.load(slots + row)
        tl.store(layer + slot * slot_stride + (head - NUM_HEADS) * HEAD_DIM + dim, numbers, mask=is_dim)


def store_rows(
    heads: torch.Tensor,
    layer: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Implements ``paged.StoreRows``."""
    num_rows, num_all_heads, head_dim = heads.shape
    num_kv_heads = layer.shape[1] // 2
    num_heads = num_all_heads - 2 * num_kv_heads
    query = torch.empty(num_rows, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    _store[(num_rows, num_all_heads)](
        heads, layer, query, slots, cos, sin, cos if head_norm is None else head_norm.weight,
        0.0 if head_norm is None else head_norm.eps, heads.stride(0), layer.stride(0),
        HAS_NORM=head_norm is not None, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return query
