"""Work item of AMX attention: some queries of some kv heads, and the scratch layout for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.simd import kernel
from specray.engine.cpu.thread_pool import as_pointer

COLUMNS = 16
"""Queries side by side in a register."""
BLOCK = 32
"""Tokens per product with values. A product with keys has as many as a register has rows."""
CHUNK = 64
"""Tokens per chunk: all queries process a chunk before the next one."""
# Registers: TOKENS holds keys or values; both of QUERIES and both of SUMS hold 32 elements of a head each.
SCORES, TOKENS, QUERIES, WEIGHTS, SUMS = 0, 1, (2, 3), 4, (5, 6)


class Work(NamedTuple):
    """Some queries of some kv heads, and the addresses of their scratch arrays."""

    first_head: int
    num_heads: int
    num_queries: int
    """Queries per kv head, row by row."""
    width: int
    """Columns of a register in use."""
    heads_per_group: int
    """Heads per group of 16 columns: more than one if they fit."""
    groups_per_head: int
    num_groups: int
    first: int
    """First token of the first chunk that any row sees."""
    end: int
    queries: int  # bfloat16 [groups, head_dim / 2, 16, 2]
    sums: int  # float32 [groups, 16, head_dim]
    most: int  # float32 [groups, 16]: the largest score
    totals: int  # float32 [groups, 16]: sums of weights
    last_seen: int  # float32 [groups, 16]: position of the last token that a query sees; without masks
    factors: int  # float32 [groups, 16]: factors on sums of earlier chunks
    scores: int  # float32 [groups, chunk, 16]
    weights: int  # bfloat16 [groups of a head, chunk / 32, 16, 32]
    keys: int  # bfloat16 [16, head_dim]: copied keys of a tile whose tokens are not contiguous
    values: int  # bfloat16 [chunk / 2, head_dim, 2]
    nothing: int  # bfloat16 [head_dim], zeros


def plan_kernel(head_dim: int) -> Any:
    """Makes ``(args, span, heads, rows, place)``, which lays out a work item from an address on."""

    @kernel()
    def plan(args: Any, span: Any, heads: tuple[int, int], rows: tuple[int, int], place: int) -> Work:
        first_row, last_row = rows
        group_size, mask = args[fields.GROUP_SIZE], span[fields.FIRST_MASK]
        num_heads, num_queries = heads[1] - heads[0], (last_row - first_row) * group_size
        start, end = span[fields.START] + first_row, span[fields.START] + last_row
        if mask >= 0:
            masks = carray(
                as_pointer(args[fields.MASKS]), (mask + last_row, fields.NUM_MASK_COLUMNS), np.int64
            )
            start, end = span[fields.START], masks[mask + last_row - 1, fields.KV_INDEX] + 1
        heads_per_group = max(1, COLUMNS // num_queries)
        groups_per_head = (num_queries + COLUMNS - 1) // COLUMNS
        num_groups = (num_heads + heads_per_group - 1) // heads_per_group * groups_per_head
        sums = place + num_groups * head_dim // 2 * tiles.LINE
        most = sums + num_groups * head_dim * tiles.LINE
        totals = most + num_groups * tiles.LINE
        last_seen = totals + num_groups * tiles.LINE
        factors = last_seen + num_groups * tiles.LINE
        scores = factors + num_groups * tiles.LINE
        weights = scores + num_groups * CHUNK * tiles.LINE
        keys = weights + groups_per_head * CHUNK * tiles.LINE // 2
        values = keys + tiles.ROWS * head_dim * 2
        nothing = values + CHUNK * head_dim * 2
        return Work(
            heads[0], num_heads, num_queries, min(COLUMNS, num_queries), heads_per_group, groups_per_head,
            num_groups, first_token(args, start), end, place, sums, most, totals, last_seen, factors,
            scores, weights, keys, values, nothing,
        )  # fmt: skip

    return plan


@kernel()
def place_of(work: Work, head: int, index: int) -> tuple[int, int]:
    """Group and column of a query."""
    if work.heads_per_group > 1:
        return head // work.heads_per_group, head % work.heads_per_group * work.num_queries + index
    return head * work.groups_per_head + index // COLUMNS, index % COLUMNS


@kernel()
def query_at(work: Work, group: int, column: int) -> tuple[int, int]:
    """Head (-1: none) and index of the query in a column."""
    if work.heads_per_group > 1:
        head = group * work.heads_per_group + column // work.num_queries
        is_there = column < work.heads_per_group * work.num_queries and head < work.num_heads
        return head if is_there else -1, column % work.num_queries
    index = group % work.groups_per_head * COLUMNS + column
    return group // work.groups_per_head if index < work.num_queries else -1, index


@kernel()
def padded_len(work: Work, chunk: int) -> int:
    """Tokens of a chunk, rounded up to full blocks."""
    return min(CHUNK, (work.end - chunk + BLOCK - 1) // BLOCK * BLOCK)


@kernel()
def first_token(args: Any, start: int) -> int:
    """First token of the first chunk that a row at position ``start`` sees."""
    window = args[fields.WINDOW]
    return max(0, start - window + 1) // CHUNK * CHUNK if window else 0


@kernel()
def runs_address(args: Any, span: Any) -> int:
    address: int = args[fields.RUNS] + span[fields.FIRST_RUN] * 3 * 8
    return address


@kernel()
def runs_at(address: int) -> Any:
    """The runs as an array: first position, last + 1, first slot. Callers stay within the span's runs."""
    return carray(as_pointer(address), (1 << 30, 3), np.int64)


@kernel()
def run_of(runs: Any, run: int, token: int) -> int:
    while runs[run, 1] <= token:
        run += 1
    return run


@kernel()
def slot(args: Any, runs: Any, run: int, token: int, slot_bytes: int) -> int:
    address: int = args[fields.CACHE] + (token + runs[run, 2] - runs[run, 0]) * slot_bytes
    return address
