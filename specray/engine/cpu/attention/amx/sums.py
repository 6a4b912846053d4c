"""Second product of AMX attention: weights times values, then normalised to the output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.amx.work import (
    BLOCK,
    CHUNK,
    COLUMNS,
    SUMS,
    TOKENS,
    WEIGHTS,
    Work,
    padded_len,
    place_of,
    run_of,
    runs_address,
    runs_at,
    slot,
)
from specray.engine.cpu.attention.attend import sink_of
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.rows import row_place
from specray.engine.cpu.gemm.transpose import deinterleave, interleave
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import as_pointer

_ONE = np.float32(1.0)


def sum_kernel(head_dim: int) -> Any:
    multiply, row = _make_sums(head_dim), vectors(head_dim, "float32")
    load, store, splat, mul = row.load, row.store, row.splat, row.mul
    head_bytes = head_dim * 2

    @kernel()
    def pair_values(args: Any, span: Any, work: Work, head: int, chunk: int, num_tokens: int) -> None:
        """Interleaves a head's values of two tokens; zeros follow the last token."""
        runs, num_kv_heads = runs_at(runs_address(args, span)), args[fields.NUM_KV_HEADS]
        offset = (num_kv_heads + work.first_head + head) * head_bytes
        slot_bytes, run = 2 * num_kv_heads * head_bytes, run_of(runs, 0, chunk)
        for tile in range(chunk, chunk + num_tokens, tiles.ROWS):
            if tile < work.end:
                run = run_of(runs, run, tile)
            value = slot(args, runs, run, tile, slot_bytes) + offset
            if tile + tiles.ROWS <= runs[run, 1]:
                for token in range(tile, tile + tiles.ROWS, 2):
                    target = work.values + (token - chunk) * head_bytes
                    for byte in range(0, head_bytes, tiles.LINE):
                        interleave(value + byte, value + slot_bytes + byte, target + 2 * byte)
                    value += 2 * slot_bytes
            else:
                for token in range(tile, tile + tiles.ROWS, 2):
                    first = second = work.nothing
                    if token < work.end:
                        run = run_of(runs, run, token)
                        first = slot(args, runs, run, token, slot_bytes) + offset
                    if token + 1 < work.end:
                        run = run_of(runs, run, token + 1)
                        second = slot(args, runs, run, token + 1, slot_bytes) + offset
                    target = work.values + (token - chunk) * head_bytes
                    for byte in range(0, head_bytes, tiles.LINE):
                        interleave(first + byte, second + byte, target + 2 * byte)

    @kernel()
    def scale(work: Work, group: int, column: int) -> None:
        """Rescales earlier sums by the factor of a larger maximum score."""
        for index in range(group * COLUMNS + column, group * COLUMNS + column + work.width):
            factor = carray(as_pointer(work.factors), (index + 1,), np.float32)[index]
            if factor != _ONE:
                store(work.sums, index * head_dim, mul(splat(factor), load(work.sums, index * head_dim)))

    @kernel()
    def sum_up(args: Any, span: Any, work: Work, heads: tuple[int, int], chunk: int) -> None:
        """Adds the weighted values of a chunk to the sums."""
        num_tokens = padded_len(work, chunk)
        for head in range(heads[0], heads[1]):
            pair_values(args, span, work, head, chunk, num_tokens)
            for part in range(work.groups_per_head):
                group, column = place_of(work, head, part * COLUMNS)
                if chunk > work.first:
                    scale(work, group, column)
                weights = work.weights + part * CHUNK * tiles.LINE // 2 + column * tiles.LINE
                sums = work.sums + (group * COLUMNS + column) * head_dim * 4
                multiply(weights, work.values, sums, num_tokens // BLOCK, chunk == work.first)

    return sum_up


def _make_sums(head_dim: int) -> Any:
    """Makes ``(weights, values, sums, num_blocks, is_first)``, which adds a head's weighted values."""
    load_values, load_weights = tiles.load(TOKENS), tiles.load(WEIGHTS)
    clear, clear_other = (tiles.zero(register) for register in SUMS)
    fetch, fetch_other = (tiles.load(register) for register in SUMS)
    keep, keep_other = (tiles.store(register) for register in SUMS)
    add, add_other = (tiles.multiply(register, WEIGHTS, TOKENS) for register in SUMS)
    line, block_bytes = head_dim * 4, BLOCK * head_dim * 2

    @kernel()
    def multiply(weights: int, values: int, sums: int, num_blocks: int, is_first: bool) -> None:
        for byte in range(0, line, 2 * tiles.LINE):
            total = sums + byte
            if is_first:
                clear()
                clear_other()
            else:
                fetch(total, line)
                fetch_other(total + tiles.LINE, line)
            for block in range(num_blocks):
                load_weights(weights + block * tiles.BYTES, tiles.LINE)
                load_values(values + block * block_bytes + byte, line)
                add()
                load_values(values + block * block_bytes + byte + tiles.LINE, line)
                add_other()
            keep(total, line)
            keep_other(total + tiles.LINE, line)

    return multiply


def take_over_kernel(head_dim: int) -> Any:
    """Makes ``(work, query, other)``: the queries of ``other`` go on from those of ``work`` from one on."""
    row = vectors(head_dim, "float32")
    load, store = row.load, row.store

    @kernel()
    def take_over(work: Work, query: int, other: Work) -> None:
        for head in range(other.num_heads):
            for index in range(other.num_queries):
                group, column = place_of(work, head, query + index)
                own_group, own_column = place_of(other, head, index)
                source, target = group * COLUMNS + column, own_group * COLUMNS + own_column
                carray(as_pointer(other.most), (target + 1,), np.float32)[target] = carray(
                    as_pointer(work.most), (source + 1,), np.float32
                )[source]
                carray(as_pointer(other.totals), (target + 1,), np.float32)[target] = carray(
                    as_pointer(work.totals), (source + 1,), np.float32
                )[source]
                store(other.sums, target * head_dim, load(work.sums, source * head_dim))

    return take_over


def finish_kernel(head_dim: int) -> Any:
    single, half = vectors(32, "float32"), vectors(32, "bfloat16")
    load, splat, mul, store = single.load, single.splat, single.mul, half.store
    sub, larger, exp, largest = single.sub, single.max, single.exp, single.largest

    @kernel()
    def finish(args: Any, span: Any, work: Work, first_row: int) -> None:
        """Divides sums by the total weights and writes the output rows."""
        group_size, step = args[fields.GROUP_SIZE], args[fields.BLOCK_STEP]
        size = args[fields.NUM_KV_HEADS] * group_size * head_dim
        totals = carray(as_pointer(work.totals), (work.num_groups * COLUMNS,), np.float32)
        highest = carray(as_pointer(work.most), (work.num_groups * COLUMNS,), np.float32)
        for head in range(work.num_heads):
            for index in range(work.num_queries):
                group, column = place_of(work, head, index)
                place = group * COLUMNS + column
                row = span[fields.FIRST_ROW] + first_row + index // group_size
                member = (work.first_head + head) * group_size + index % group_size
                out, sums = row_place(row, size, args[fields.OUT_STEP]), work.sums + place * head_dim * 4
                out += member * head_dim // 32 * step
                most, total, sink = splat(highest[place]), totals[place], splat(sink_of(args, member))
                # Sums are relative to the highest score; the sink's may be higher.
                anchor = larger(most, sink)
                kept, own = largest(exp(sub(most, anchor))), largest(exp(sub(sink, anchor)))
                factor = splat(kept / (total * kept + own))
                for first in range(0, head_dim, 32):
                    deinterleave(sums + first * 4)
                    store(args[fields.OUT], out, mul(factor, load(sums, first)))
                    out += step

    return finish
