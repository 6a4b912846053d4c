"""First product of AMX attention: keys times queries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.amx.work import (
    CHUNK,
    COLUMNS,
    QUERIES,
    SCORES,
    TOKENS,
    Work,
    place_of,
    query_at,
    run_of,
    runs_address,
    runs_at,
    slot,
)
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.transpose import transpose_words
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import as_pointer

_ZERO = np.float32(0.0)


def pack_kernel(head_dim: int) -> Any:
    single, half = vectors(head_dim, "float32"), vectors(head_dim, "bfloat16")
    load, store, splat, row_bytes = single.load, half.store, half.splat, head_dim * 2

    @kernel()
    def pack(args: Any, work: Work, queries: int, step: int, first_position: int) -> None:
        """Packs queries as bfloat16, two elements of a query next to the same two of the next.

        ``step`` queries lie between the first of a head and that of the next.
        """
        last_seen = carray(as_pointer(work.last_seen), (work.num_groups, COLUMNS), np.float32)
        for group in range(work.num_groups):
            for column in range(COLUMNS):
                head, index = query_at(work, group, column)
                number = splat(_ZERO)
                if head >= 0:
                    last_seen[group, column] = first_position + index // args[fields.GROUP_SIZE]
                    number = load(queries, (head * step + index) * head_dim)
                store(work.keys, column * head_dim, number)
            target = work.queries + group * COLUMNS * row_bytes
            for byte in range(0, row_bytes, tiles.LINE):
                transpose_words(work.keys + byte, row_bytes, target + byte * COLUMNS)
        store(work.nothing, 0, splat(_ZERO))

    return pack


def score_kernel(head_dim: int) -> Any:
    half = vectors(head_dim, "bfloat16")
    load_queries, multiply = _make_scores(head_dim // 32)
    load_row, store_row = half.load, half.store
    head_bytes, queries_bytes = head_dim * 2, head_dim // 2 * tiles.LINE

    @kernel()
    def score(args: Any, span: Any, work: Work, heads: tuple[int, int], part: int, chunk: int) -> None:
        """Computes scores of a chunk's tokens with one group of queries: of some heads, or a part of one."""
        runs, slot_bytes = runs_at(runs_address(args, span)), 2 * args[fields.NUM_KV_HEADS] * head_bytes
        first_run = run_of(runs, 0, chunk)
        for head in range(heads[0], heads[1]):
            offset, run = (work.first_head + head) * head_bytes, first_run
            group, column = place_of(work, head, part * COLUMNS)
            queries = work.queries + group * queries_bytes + column * 4
            load_queries(queries)
            for token in range(chunk, min(chunk + CHUNK, work.end), tiles.ROWS):
                scores = work.scores + (group * CHUNK + token - chunk) * tiles.LINE + column * 4
                run = run_of(runs, run, token)
                if token + tiles.ROWS <= runs[run, 1]:
                    keys = slot(args, runs, run, token, slot_bytes) + offset
                    multiply(keys, slot_bytes, queries, scores)
                else:
                    there = run
                    for index in range(min(tiles.ROWS, work.end - token)):
                        there = run_of(runs, there, token + index)
                        key = slot(args, runs, there, token + index, slot_bytes) + offset
                        store_row(work.keys, index * head_dim, load_row(key, 0))
                    multiply(work.keys, head_bytes, queries, scores)

    return score


def _make_scores(num_pieces: int) -> Any:
    """Makes ``(address)``, which loads queries, and ``(keys, stride, address, scores)``, the product."""
    clear, keep, load_keys = tiles.zero(SCORES), tiles.store(SCORES), tiles.load(TOKENS)
    load_even, load_odd = (tiles.load(register) for register in QUERIES)
    even, odd = (tiles.multiply(SCORES, TOKENS, register) for register in QUERIES)

    @kernel()
    def load_queries(place: int) -> None:
        load_even(place, tiles.LINE)
        if num_pieces > 1:
            load_odd(place + tiles.BYTES, tiles.LINE)

    @kernel()
    def multiply(keys: int, stride: int, place: int, scores: int) -> None:
        clear()
        load_keys(keys, stride)
        even()
        if num_pieces > 1:
            load_keys(keys + tiles.LINE, stride)
            odd()
        for piece in range(2, num_pieces):
            load_even(place + piece * tiles.BYTES, tiles.LINE)
            load_keys(keys + piece * tiles.LINE, stride)
            even()
        if num_pieces > 2:
            load_even(place, tiles.LINE)
        keep(scores, tiles.LINE)

    return load_queries, multiply
