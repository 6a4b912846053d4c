"""Attention prologue: q/k norm, RoPE, cache write, and queries in the layout that attention reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.gemm.rows import BLOCK, row_place
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import as_pointer

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@kernel()
def feature_place(feature: int, block_step: int) -> int:
    """Offset of a feature from the beginning of its row, in elements."""
    return feature // BLOCK * block_step + feature % BLOCK


def rope_cache_kernel(head_dim: int, dtype: str, latent_dim: int = 0) -> Any:
    """Makes ``(args, span, first_head, last_head, queries)`` for some kv heads of a sequence.

    With latents, these are the first numbers of a head and are not rotated, all kv heads share one key, which
    each writes, and there are no values.
    """
    half = (head_dim - latent_dim) // 2
    # Elements at once: in packed rows they lie within one block, and so do those of the other half.
    size = half if head_dim % BLOCK or latent_dim else math.gcd(half, BLOCK)
    stored, single = vectors(size, dtype), vectors(size, "float32")
    load, store, keep, table = stored.load, stored.store, single.store, single.load
    splat, sub, mul, fma, total = (
        single.splat, single.sub, single.mul, single.fma, single.sum
    )  # fmt: skip
    still = math.gcd(latent_dim, BLOCK)
    stored_still, single_still = vectors(still or 1, dtype), vectors(still or 1, "float32")
    load_still, store_still, keep_still = stored_still.load, stored_still.store, single_still.store
    splat_still, mul_still = single_still.splat, single_still.mul

    @kernel()
    def norm_factor(qkv: int, row: int, feature: int, block_step: int, eps: Any) -> Any:
        squares = splat(_ZERO)
        for first in range(0, head_dim, size):
            numbers = load(qkv, row + feature_place(feature + first, block_step))
            squares = fma(numbers, numbers, squares)
        return _ONE / np.sqrt(total(squares) / np.float32(head_dim) + eps)

    @kernel()
    def rope_cache(args: Any, span: Any, first_head: int, last_head: int, queries: int) -> None:
        """Norms and rotates heads; writes scaled queries to ``queries``, keys and values to the cache."""
        qkv, cache, norm = args[fields.QKV], args[fields.CACHE], args[fields.NORM]
        is_wide = args[fields.IS_NORM_WIDE]
        num_kv_heads, group_size = args[fields.NUM_KV_HEADS], args[fields.GROUP_SIZE]
        num_heads, step = num_kv_heads * group_size, args[fields.BLOCK_STEP]
        row_size, slot_size = (num_heads + 2 * num_kv_heads) * head_dim, 2 * num_kv_heads * head_dim
        if latent_dim:
            row_size, slot_size = (num_heads + 1) * head_dim, head_dim
        scale_eps = args.view(np.float32)[2 * fields.SCALE_EPS :]
        runs = carray(
            as_pointer(args[fields.RUNS]), (span[fields.FIRST_RUN] + span[fields.NUM_RUNS], 3), np.int64
        )
        masks = carray(
            as_pointer(args[fields.MASKS]),
            (span[fields.FIRST_MASK] + span[fields.NUM_ROWS], fields.NUM_MASK_COLUMNS),
            np.int64,
        )
        scale, factor = splat(scale_eps[0]), splat(_ONE)
        run = span[fields.FIRST_RUN]
        for index in range(span[fields.NUM_ROWS]):
            row = row_place(span[fields.FIRST_ROW] + index, row_size, args[fields.QKV_STEP])
            kv_index = position = span[fields.START] + index
            if span[fields.FIRST_MASK] >= 0:
                position = masks[span[fields.FIRST_MASK] + index, fields.POSITION]
                kv_index = masks[span[fields.FIRST_MASK] + index, fields.KV_INDEX]
            while runs[run, 1] <= kv_index:
                run += 1
            slot = (runs[run, 2] + kv_index - runs[run, 0]) * slot_size
            # The query heads of a kv head, then the kv head itself.
            for head in range(first_head, last_head):
                for member in range(group_size + 1):
                    is_key = member == group_size
                    number = num_heads + head if is_key else head * group_size + member
                    at, key = number * head_dim, slot + head * head_dim
                    if latent_dim:
                        at, key = min(number, num_heads) * head_dim, slot
                    # Ordered by kv head, then row, then member of the group.
                    query = ((head - first_head) * span[fields.NUM_ROWS] + index) * group_size + member
                    if norm:
                        factor = splat(norm_factor(qkv, row, at, step, scale_eps[1]))
                    for first in range(0, latent_dim, still):
                        numbers = load_still(qkv, row + at + first)
                        if is_key:
                            store_still(cache, key + first, numbers)
                        else:
                            numbers = mul_still(numbers, splat_still(scale_eps[0]))
                            keep_still(queries, query * head_dim + first, numbers)
                    at, key = at + latent_dim, key + latent_dim
                    query_at = query * head_dim + latent_dim
                    for first in range(0, half, size):
                        cos = table(args[fields.COS], position * half + first)
                        sin = table(args[fields.SIN], position * half + first)
                        low = load(qkv, row + feature_place(at + first, step))
                        high = load(qkv, row + feature_place(at + first + half, step))
                        if norm and is_wide:
                            low = mul(mul(low, factor), table(norm, at + first))
                            high = mul(mul(high, factor), table(norm, at + first + half))
                        elif norm:
                            low = mul(mul(low, factor), load(norm, at + first))
                            high = mul(mul(high, factor), load(norm, at + first + half))
                        new_low = sub(mul(low, cos), mul(high, sin))
                        new_high = fma(high, cos, mul(low, sin))
                        if is_key:
                            store(cache, key + first, new_low)
                            store(cache, key + first + half, new_high)
                        else:
                            keep(queries, query_at + first, mul(new_low, scale))
                            keep(queries, query_at + first + half, mul(new_high, scale))
                if latent_dim:
                    continue
                value = (num_heads + num_kv_heads + head) * head_dim
                copy = slot + (num_kv_heads + head) * head_dim
                for first in range(0, head_dim, size):
                    store(cache, copy + first, load(qkv, row + feature_place(value + first, step)))

    return rope_cache
