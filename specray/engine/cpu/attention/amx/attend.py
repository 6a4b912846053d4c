"""Attention of some rows over keys and values in the cache, with AMX: products of bfloat16, sums of float32.

Scores are keys times queries, for keys lie in the cache as the instruction wants its first factor. What 16
queries of one or several kv heads give stands side by side, ``[tokens, 16]``, so that a softmax runs down
sixteen columns at once. Its weights are turned on their side to be the first factor of the second product,
and values are paired token with token to be its second. Rounded are queries and weights only.

Tokens come in chunks; what was summed before is scaled when a later chunk has a larger score (Milakov and
Gimelshein: *Online normalizer calculation for softmax*, 2018), so that all of a chunk stays in the first
cache. What comes next is left to the processor to fetch: asked for ahead of time, it keeps a core, which
waits for sixteen lines at most, from what it needs now (measured: 3 % longer with 32 sequences, a draft's
13 %; with one long sequence a tenth less). Chunks are counted from the first position, and what a row does
not see weighs 0: its result does not depend on the other rows, nor on their number.
"""

from __future__ import annotations

from typing import Any

from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.amx.scores import pack_kernel, score_kernel
from specray.engine.cpu.attention.amx.sums import finish_kernel, sum_kernel
from specray.engine.cpu.attention.amx.weights import weigh_kernel
from specray.engine.cpu.attention.amx.work import (
    CHUNK,
    COLUMNS,
    QUERIES,
    SCORES,
    SUMS,
    TOKENS,
    WEIGHTS,
    plan_kernel,
)
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.simd import kernel

MAX_QUERIES = 64
"""Query heads times rows at once: a chunk's scores of all heads stay in the second cache."""
_MAX_HEAD_DIM = 128
"""Others have not been tried."""


def fits(head_dim: int) -> bool:
    """Whether heads are as the registers want them."""
    return head_dim % 32 == 0 and head_dim <= _MAX_HEAD_DIM


def scratch_size(num_queries: int, num_kv_heads: int, head_dim: int, end: int) -> int:
    """Float32 numbers that a thread needs.

    Args:
        num_queries: of each kv head.
        end: does not matter.
    """
    groups_per_head = -(-num_queries // COLUMNS)
    of_group = COLUMNS * (head_dim // 2 + head_dim + 4 + CHUNK)
    of_chunk = COLUMNS * CHUNK * groups_per_head // 2
    return num_kv_heads * groups_per_head * of_group + of_chunk + (tiles.ROWS + CHUNK + 1) * head_dim


def attend_kernel(head_dim: int) -> Any:
    """As that of ``attend``, for bfloat16."""
    pack, score, weigh = pack_kernel(head_dim), score_kernel(head_dim), weigh_kernel()
    plan, sum_up, finish = plan_kernel(head_dim), sum_kernel(head_dim), finish_kernel(head_dim)
    configure, release = tiles.configure((SCORES, *QUERIES), (TOKENS,), (WEIGHTS, *SUMS)), tiles.release

    @kernel()
    def attend(
        args: Any,
        span: Any,
        heads: tuple[int, int],
        rows: tuple[int, int],
        queries: int,
        thread: int,
    ) -> None:
        work = plan(args, span, heads, rows, thread)
        pack(args, work, queries, span[fields.START] + rows[0])
        configure((tiles.ROWS, 4 * work.width, tiles.ROWS, tiles.LINE, work.width, tiles.LINE))
        step, num_parts = work.heads_per_group, work.groups_per_head
        for chunk in range(work.first, work.end, CHUNK):
            for head in range(0, work.num_heads, step):
                some_heads = head, min(head + step, work.num_heads)
                for part in range(num_parts):
                    score(args, span, work, some_heads, part, chunk)
            for head in range(0, work.num_heads, step):
                some_heads = head, min(head + step, work.num_heads)
                for part in range(num_parts):
                    weigh(args, span, work, head // step * num_parts + part, rows[0], chunk)
                sum_up(args, span, work, some_heads, chunk)
        finish(args, span, work, rows[0])
        release()

    return attend
