"""Float32 attention of some rows over cached keys and values: scores, softmax, weighted sum.

Keys and values are read once, token by token in cache order, and every query uses them from registers and L1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.scores import TILE, scores_kernel
from specray.engine.cpu.attention.softmax import softmax_kernel
from specray.engine.cpu.simd import kernel, prefetch, vectors
from specray.engine.cpu.thread_pool import as_pointer

MAX_QUERIES = 32
"""Maximum query heads times rows at once, so that their scores stay in L2."""
NO_SINK = np.float32(-1e30)
"""Score that weighs nothing next to any other."""
_LATENT_NUMBERS = 64
"""Numbers of a latent at once, at most."""
_LINE = 64
"""Bytes of a cache line."""


def scratch_size(num_queries: int, num_kv_heads: int, head_dim: int, end: int) -> int:
    """Scratch size of a thread, in float32.

    Args:
        num_queries: queries per kv head.
        end: KV index after the last row.
    """
    return num_queries * num_kv_heads * (end + 2 * TILE + head_dim) + TILE * head_dim


@kernel()
def seen(args: Any, span: Any, row: int) -> tuple[int, int, int, int, int, int]:
    """What a row of a span sees: (first, last + 1) of a range of KV indices, then ancestors of a tree's row.

    These are (first, last + 1, mask, position): the bits of the mask stand for KV indices from the first on,
    and the position is that of the lowest one, whose place the others follow on a chain. Of a chain's row the
    mask is 0.
    """
    window, mask = args[fields.WINDOW], span[fields.FIRST_MASK]
    position = span[fields.START] + row
    if mask < 0:
        lowest = max(0, position - window + 1) if window else 0
        return lowest, position + 1, position + 1, position + 1, 0, position + 1
    masks = carray(as_pointer(args[fields.MASKS]), (mask + row + 1, fields.NUM_MASK_COLUMNS), np.int64)
    own = masks[mask + row]
    first, last, highest, ancestors = (
        own[fields.FIRST_INDEX], own[fields.KV_INDEX], own[fields.PREFIX_LEN], own[fields.ANCESTORS]
    )  # fmt: skip
    lowest, nearest = 0, highest
    if window:
        lowest = min(highest, max(0, own[fields.POSITION] - window + 1))
        # The farthest ancestors are the lowest bits.
        for _ in range(own[fields.POSITION] + 1 - highest - window):
            ancestors &= ancestors - 1
            nearest += 1
    return lowest, highest, first, last + 1, ancestors, nearest


@kernel()
def sink_of(args: Any, head: int) -> Any:
    """Score of a query head's sink; without sinks the lowest."""
    if args[fields.SINKS] == 0:
        return NO_SINK
    sinks = carray(as_pointer(args[fields.SINKS]), (head + 1,), np.float32)
    return sinks[head]


def attend_kernel(head_dim: int, dtype: str, latent_dim: int = 0) -> Any:
    """Makes the kernel; with latents, keys have one place for all kv heads, and begin with their values."""
    value_dim = latent_dim or head_dim
    # Numbers at once of keys and values: registers hold the sums of two queries.
    width = math.gcd(head_dim, latent_dim, _LATENT_NUMBERS) if latent_dim else head_dim
    stored, single = vectors(width, dtype), vectors(width, "float32")
    load, store = stored.load, stored.store
    fetch, keep, splat, mul, fma = single.load, single.store, single.splat, single.mul, single.fma
    scores, softmax, item_size = scores_kernel(head_dim), softmax_kernel(), 2 if dtype == "bfloat16" else 4
    zero, query_bytes, head_step = np.float32(0.0), head_dim * 4, 0 if latent_dim else head_dim

    @kernel()
    def take(cache: int, place: int, slot_size: int, size: int, tile: int, count: int) -> None:
        """Copies some tokens' numbers to the tile, and prefetches those of the next."""
        for token in range(count):
            for first in range(0, size, width):
                keep(tile, token * size + first, load(cache, place + token * slot_size + first))
            ahead = cache + (place + (token + TILE) * slot_size) * item_size
            for byte in range(0, size * item_size, _LINE):
                prefetch(ahead + byte)

    @kernel()
    def attend(
        args: Any,
        span: Any,
        heads: tuple[int, int],
        rows: tuple[int, int],
        queries: int,
        thread: int,
    ) -> None:
        """Computes attention for some rows and heads of a span.

        Args:
            heads: first and last + 1 of the kv heads.
            rows: first and last + 1 of the span's rows.
            queries: address of the queries from ``rope_cache``: float32, by kv head, then by row.
        """
        cache, window = args[fields.CACHE], args[fields.WINDOW]
        num_kv_heads, group_size = args[fields.NUM_KV_HEADS], args[fields.GROUP_SIZE]
        first_head, last_head = heads
        first_row, last_row = rows
        slot_size, num_heads = 2 * num_kv_heads * head_step, num_kv_heads * group_size
        values_at = num_kv_heads * head_step
        if latent_dim:
            slot_size = head_dim
        num_queries = (last_row - first_row) * group_size
        start, end, mask = (
            span[fields.START] + first_row,
            span[fields.START] + last_row,
            span[fields.FIRST_MASK],
        )
        if mask >= 0:
            masks = carray(
                as_pointer(args[fields.MASKS]), (mask + last_row, fields.NUM_MASK_COLUMNS), np.int64
            )
            start, end = span[fields.START], masks[mask + last_row - 1, fields.KV_INDEX] + 1
        first_position = max(0, start - window + 1) if window else 0
        stride = (end + TILE - 1) // TILE * TILE
        num_all = (last_head - first_head) * num_queries
        sums = (
            args[fields.SCRATCH] + (thread * args[fields.SCRATCH_SIZE] + args[fields.NUM_QUERY_NUMBERS]) * 4
        )
        tile = sums + num_all * value_dim * 4
        weights_address = tile + TILE * head_dim * 4
        # A tile may extend past the last token; softmax leaves its normalising factor there.
        weights_size = stride + TILE
        weights = carray(as_pointer(weights_address), (num_all, weights_size), np.float32)
        last_run = span[fields.FIRST_RUN] + span[fields.NUM_RUNS]
        runs = carray(as_pointer(args[fields.RUNS]), (last_run, 3), np.int64)

        for run in range(span[fields.FIRST_RUN], last_run):
            shift = runs[run, 2] - runs[run, 0]
            last = min(end, runs[run, 1])
            for begin in range(max(first_position, runs[run, 0]), last, TILE):
                count = min(TILE, last - begin)
                for head in range(last_head - first_head):
                    key = (begin + shift) * slot_size + (first_head + head) * head_step
                    take(cache, key, slot_size, head_dim, tile, count)
                    # Two queries per load of a key.
                    for index in range(head * num_queries, (head + 1) * num_queries, 2):
                        other = min(index + 1, (head + 1) * num_queries - 1)
                        query, other_query = queries + index * query_bytes, queries + other * query_bytes
                        found = weights_address + (index * weights_size + begin) * 4
                        other_found = weights_address + (other * weights_size + begin) * 4
                        scores(query, other_query, tile, found, other_found)

        for index in range(num_all):
            places = seen(args, span, first_row + index % num_queries // group_size)
            row = weights_address + index * weights_size * 4
            head = (first_head + index // num_queries) * group_size + index % group_size
            softmax(weights, row, index, first_position, places, sink_of(args, head))
            for first in range(0, value_dim, width):
                keep(sums, index * value_dim + first, splat(zero))

        for run in range(span[fields.FIRST_RUN], last_run):
            shift = runs[run, 2] - runs[run, 0]
            last = min(end, runs[run, 1])
            for begin in range(max(first_position, runs[run, 0]), last, TILE):
                count = min(TILE, last - begin)
                for head in range(last_head - first_head):
                    value = (begin + shift) * slot_size + values_at + (first_head + head) * head_step
                    take(cache, value, slot_size, value_dim, tile, count)
                    for index in range(head * num_queries, (head + 1) * num_queries, 2):
                        other = min(index + 1, (head + 1) * num_queries - 1)
                        for first in range(0, value_dim, width):
                            at, other_at = index * value_dim + first, other * value_dim + first
                            weighted, other_weighted = fetch(sums, at), fetch(sums, other_at)
                            for token in range(count):
                                number = fetch(tile, token * value_dim + first)
                                weight, other_weight = (
                                    weights[index, begin + token],
                                    weights[other, begin + token],
                                )
                                weighted = fma(splat(weight), number, weighted)
                                other_weighted = fma(splat(other_weight), number, other_weighted)
                            keep(sums, at, weighted)
                            keep(sums, other_at, other_weighted)

        for index in range(num_all):
            row = span[fields.FIRST_ROW] + first_row + index % num_queries // group_size
            head = (first_head + index // num_queries) * group_size + index % group_size
            factor = splat(weights[index, weights_size - TILE])
            for first in range(0, value_dim, width):
                store(
                    args[fields.OUT],
                    (row * num_heads + head) * value_dim + first,
                    mul(factor, fetch(sums, index * value_dim + first)),
                )

    return attend
