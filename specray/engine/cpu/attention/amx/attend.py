"""AMX attention of some rows over cached keys and values: bfloat16 products, float32 sums.

Scores are keys times queries, because the cache layout of keys fits the instruction's first operand. Scores
of 16 queries of one or several kv heads lie side by side, ``[tokens, 16]``, so a softmax runs down sixteen
columns at once. Its weights are transposed to be the first operand of the second product, and values of two
tokens are interleaved to be its second. Only queries and weights are rounded to bfloat16.

Tokens are processed in chunks that stay in L1. Earlier sums are rescaled when a later chunk has a larger
score (Milakov and Gimelshein: *Online normalizer calculation for softmax*, 2018). Prefetching is left to the
processor: a core has about sixteen lines in flight, and software prefetches delay the loads that it needs now
(measured: 3 % slower with 32 sequences, 13 % in a draft; 10 % faster with one long sequence). Chunks start at
multiples from position 0, and hidden tokens weigh 0: a row's result does not depend on the other rows.

Rows of a tree share the chunks that all of them see. From there on each goes on alone over its own path,
whose tokens are taken in the order of their positions: so its result is that of the same row on a chain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.amx.scores import pack_kernel, score_kernel
from specray.engine.cpu.attention.amx.sums import finish_kernel, sum_kernel, take_over_kernel
from specray.engine.cpu.attention.amx.weights import weigh_kernel
from specray.engine.cpu.attention.amx.work import (
    CHUNK,
    COLUMNS,
    QUERIES,
    SCORES,
    SUMS,
    TOKENS,
    WEIGHTS,
    Work,
    plan_kernel,
)
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.simd import kernel
from specray.engine.cpu.thread_pool import as_pointer

MAX_QUERIES = 64
"""Maximum query heads times rows at once, so that a chunk's scores of all heads stay in L2."""
_MAX_HEAD_DIM = 128
"""Largest head size that is tested."""


def fits(head_dim: int) -> bool:
    return head_dim % 32 == 0 and head_dim <= _MAX_HEAD_DIM


def scratch_size(num_queries: int, num_kv_heads: int, head_dim: int, end: int) -> int:
    """Scratch size of a thread, in float32.

    Args:
        num_queries: queries per kv head.
        end: ignored.
    """
    groups_per_head = -(-num_queries // COLUMNS)
    of_group = COLUMNS * (head_dim // 2 + head_dim + 4 + CHUNK)
    of_chunk = COLUMNS * CHUNK * groups_per_head // 2
    return num_kv_heads * groups_per_head * of_group + of_chunk + (tiles.ROWS + CHUNK + 1) * head_dim


def attend_kernel(head_dim: int) -> Any:
    """Makes the counterpart of ``attention.attend.attend_kernel`` for bfloat16."""
    pack, score, weigh = pack_kernel(head_dim), score_kernel(head_dim), weigh_kernel()
    plan, sum_up, finish = plan_kernel(head_dim), sum_kernel(head_dim), finish_kernel(head_dim)
    take_over = take_over_kernel(head_dim)
    configure, release = tiles.configure((SCORES, *QUERIES), (TOKENS,), (WEIGHTS, *SUMS)), tiles.release

    @kernel()
    def walk(args: Any, span: Any, work: Work, first_row: int, tokens: tuple[int, int]) -> None:
        """Takes the tokens from a chunk's first on into the sums."""
        configure((tiles.ROWS, 4 * work.width, tiles.ROWS, tiles.LINE, work.width, tiles.LINE))
        step, num_parts = work.heads_per_group, work.groups_per_head
        for chunk in range(tokens[0], tokens[1], CHUNK):
            for head in range(0, work.num_heads, step):
                some_heads = head, min(head + step, work.num_heads)
                for part in range(num_parts):
                    score(args, span, work, some_heads, part, chunk)
            for head in range(0, work.num_heads, step):
                some_heads = head, min(head + step, work.num_heads)
                for part in range(num_parts):
                    weigh(args, span, work, head // step * num_parts + part, first_row, chunk)
                sum_up(args, span, work, some_heads, chunk)

    @kernel()
    def attend(
        args: Any,
        span: Any,
        heads: tuple[int, int],
        rows: tuple[int, int],
        queries: int,
        thread: int,
    ) -> None:
        room = thread * args[fields.SCRATCH_SIZE] + args[fields.NUM_QUERY_NUMBERS]
        work = plan(args, span, heads, rows, args[fields.SCRATCH] + 4 * room)
        pack(args, work, queries, work.num_queries, span[fields.START] + rows[0])
        if span[fields.FIRST_MASK] < 0:
            walk(args, span, work, rows[0], (work.first, work.end))
            finish(args, span, work, rows[0])
            release()
            return
        first_mask, group_size = span[fields.FIRST_MASK] + rows[0], args[fields.GROUP_SIZE]
        num_rows = rows[1] - rows[0]
        shape = first_mask + num_rows, fields.NUM_MASK_COLUMNS
        masks = carray(as_pointer(args[fields.MASKS]), shape, np.int64)
        shared = work.end
        for row in range(num_rows):
            shared = min(shared, masks[first_mask + row, fields.PREFIX_LEN])
        shared = max(work.first, shared // CHUNK * CHUNK)
        walk(args, span, work, rows[0], (work.first, shared))
        place = work.nothing + (head_dim * 2 + tiles.LINE - 1) // tiles.LINE * tiles.LINE
        spans_shape = first_mask + num_rows, fields.NUM_COLUMNS
        spans = carray(as_pointer(args[fields.ROW_SPANS]), spans_shape, np.int64)
        for row in range(num_rows):
            own = spans[first_mask + row]
            alone = plan(args, own, heads, (0, 1), place)
            own_queries = queries + row * group_size * head_dim * 4
            pack(args, alone, own_queries, work.num_queries, own[fields.START])
            if alone.first < shared:
                take_over(work, row * group_size, alone)
            walk(args, own, alone, 0, (max(alone.first, shared), alone.end))
            finish(args, own, alone, 0)
        release()

    return attend
