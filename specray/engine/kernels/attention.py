"""Attention of a ragged step in one kernel per layer: head norms, rotary positions, cache write, attention.

Kv heads do not depend on each other, so a thread takes some kv heads of some sequences through all of it,
without waiting for the others. Keys and values are read once per sequence, token after token as they lie in
the cache, and every row and query head of the sequence is served from the registers and the first cache.
Sums are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.kernels.scores import TILE, scores_kernel
from specray.engine.kernels.simd import kernel, prefetch, vectors
from specray.engine.kernels.softmax import softmax_kernel
from specray.engine.kernels.span import Span
from specray.engine.kernels.team import Kernel, Team, as_pointer

_LINE = 64
"""Bytes of a cache line."""
_MAX_QUERIES = 32
"""Query heads times rows that are served from one reading of keys and values."""
_PARTS_PER_THREAD = 4
_MIN_SHARED_WORK = 32_768
"""Numbers of K and V to read, below which a second thread costs more than it brings."""

# Fields of the block of 64-bit numbers that the kernel is given; addresses unless said otherwise.
_QKV = 0  # [num_rows, num_heads + 2 * num_kv_heads, head_dim]
_CACHE = 1  # [num_slots, 2 * num_kv_heads, head_dim]
_OUT = 2  # [num_rows, num_heads, head_dim]
_NORM = 3  # [num_heads + num_kv_heads, head_dim], or 0
_WINDOW = 4  # a number; 0: none
_SPANS = 5  # int64 [num_spans, 7]
_RUNS = 6  # int64 [., 3]: first position, last + 1, first slot
_COS = 7  # float32 [max_model_len, head_dim / 2]
_SIN = 8
_SCRATCH = 9  # float32, _SCRATCH_SIZE for each thread
_SCRATCH_SIZE = 10  # a number
_NUM_SPANS = 11  # a number
_NUM_KV_HEADS = 12  # a number
_GROUP_SIZE = 13  # a number
_NUM_QUERY_NUMBERS = 14  # a number: of the scratch, what is for the queries
_SCALE_EPS = 15  # two float32, not an address
_BRANCHES = 16  # int64 [., 4]
_NUM_ARGS = 17

# Columns of a span: the rows of one sequence. _FIRST_BRANCH is that of its first row, or -1.
_START, _FIRST_ROW, _NUM_ROWS, _FIRST_RUN, _NUM_RUNS, _COST, _FIRST_BRANCH = range(7)
_NUM_COLUMNS = 7
# Columns of a branch row.
_POSITION, _PLACE, _TRUNK_LEN, _FIRST_PLACE = range(4)

_ONE = np.float32(1.0)


class AttentionCall:
    """The kernel over the rows of one step, layer after layer.

    Args:
        tables: cosines and sines, ``[max_model_len, head_dim / 2]`` each, float32.
        scale: factor on the dot products.
    """

    __slots__ = (
        "_args", "_args_address", "_kept", "_kernel", "_num_heads", "_num_parts", "_scale_eps", "_team"
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        team: Team,
        spans: Sequence[Span],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> None:
        group_size = num_heads // num_kv_heads
        runs = np.array([run for span in spans for run in span.runs], dtype=np.int64)
        branches = np.array(
            [
                (row.position, row.place, row.trunk_len, row.first_place)
                for span in spans
                for row in span.branches
            ],
            dtype=np.int64,
        )
        columns, first_run, num_scratch, num_query_numbers, work, first_branch = [], 0, 0, 0, 0, 0
        for span in spans:
            end, num_runs = span.end, len(span.runs)
            num_queries = span.num_rows * group_size
            cost = end * (2 + num_queries)
            branch = first_branch if span.branches else -1
            columns.append((span.start, span.first_row, span.num_rows, first_run, num_runs, cost, branch))
            first_run += num_runs
            first_branch += len(span.branches)
            work += cost * num_kv_heads
            num_query_numbers = max(num_query_numbers, num_queries * num_kv_heads * head_dim)
            # All heads of few rows, or one head of some of many.
            num_at_once = min(num_queries, max(_MAX_QUERIES, group_size)) * num_kv_heads
            num_scratch = max(num_scratch, num_at_once * (end + 2 * TILE + head_dim))
        self._team = team
        is_shared = team.size > 1 and work * head_dim >= _MIN_SHARED_WORK
        self._num_parts = min(len(spans) * num_kv_heads, _PARTS_PER_THREAD * team.size) if is_shared else 1
        num_scratch += num_query_numbers + TILE * head_dim
        scratch = torch.empty(team.size * num_scratch)
        table = np.array(columns, dtype=np.int64)
        self._args = np.array(
            [
                *(0, 0, 0, 0, 0),
                table.ctypes.data,
                runs.ctypes.data,
                tables[0].data_ptr(),
                tables[1].data_ptr(),
                scratch.data_ptr(),
                num_scratch,
                len(spans),
                num_kv_heads,
                group_size,
                num_query_numbers,
                0,
                branches.ctypes.data,
            ],
            dtype=np.int64,
        )
        self._scale_eps = self._args.view(np.float32)[2 * _SCALE_EPS :]
        self._scale_eps[0] = scale
        self._args_address = self._args.ctypes.data
        self._kept = (table, runs, branches, scratch, tables)  # what the addresses point to
        self._kernel = kernel
        self._num_heads = num_heads

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        window: int | None,
    ) -> torch.Tensor:
        """One layer.

        Args:
            qkv: ``[num_rows, num_heads + 2 * num_kv_heads, head_dim]``, contiguous.
            cache: ``[num_slots, 2 * num_kv_heads, head_dim]``, contiguous.
            norm: weights of the head norm, ``[num_heads + num_kv_heads, head_dim]``, and its eps.
            window: a row sees itself and the ``window - 1`` positions before it; None: all before it.

        Returns:
            ``[num_rows, num_heads, head_dim]``.
        """
        out = self._team.empty((qkv.shape[0], self._num_heads, qkv.shape[2]), qkv.dtype)
        args = self._args
        args[_QKV], args[_CACHE], args[_OUT] = qkv.data_ptr(), cache.data_ptr(), out.data_ptr()
        args[_WINDOW] = window or 0
        if norm is not None:
            args[_NORM], self._scale_eps[1] = norm[0].data_ptr(), norm[1]
        self._team.run(self._kernel, self._args_address, self._num_parts)
        return out

    def retarget(self, args: np.ndarray) -> int:
        """Makes recorded calls of the same rows attend as this one would.

        Args:
            args: int64 ``[num_calls, arguments of the kernel]``.

        Returns:
            The number of parts.
        """
        args[:, _SPANS:_SCALE_EPS] = self._args[_SPANS:_SCALE_EPS]
        args[:, _BRANCHES] = self._args[_BRANCHES]
        return self._num_parts


@functools.cache
def attention_kernel(head_dim: int, dtype: str) -> Kernel:
    """The kernel for heads of ``head_dim`` numbers that are ``bfloat16`` or ``float32``."""
    return Kernel(f"attention-{dtype}-{head_dim}", _NUM_ARGS, lambda: _make_attention(head_dim, dtype))


def _make_attention(head_dim: int, dtype: str) -> Any:
    rotate = _rotate_kernel(head_dim, dtype)
    attend = _attend_kernel(head_dim, dtype)

    def attention(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        spans = carray(as_pointer(args[_SPANS]), (args[_NUM_SPANS], _NUM_COLUMNS), np.int64)
        num_kv_heads = args[_NUM_KV_HEADS]
        total = 0
        for index in range(len(spans)):
            total += spans[index, _COST] * num_kv_heads
        # The part's heads are those that begin in its share of the total cost.
        first, last = total * part // num_parts, total * (part + 1) // num_parts
        before = 0
        for index in range(len(spans)):
            cost = spans[index, _COST]
            first_head = min(num_kv_heads, max(0, (first - before + cost - 1) // cost))
            last_head = min(num_kv_heads, max(0, (last - before + cost - 1) // cost))
            before += cost * num_kv_heads
            if first_head < last_head:
                queries = args[_SCRATCH] + thread * args[_SCRATCH_SIZE] * 4
                rotate(args, spans[index], first_head, last_head, queries)
                num_rows, group_size = spans[index, _NUM_ROWS], args[_GROUP_SIZE]
                if num_rows * group_size <= _MAX_QUERIES:
                    attend(args, spans[index], (first_head, last_head), 0, num_rows, queries, thread)
                else:
                    # Head by head and some rows at a time, so that the weights stay in the second cache.
                    step = max(1, _MAX_QUERIES // group_size)
                    for head in range(first_head, last_head):
                        for row in range(0, num_rows, step):
                            place = ((head - first_head) * num_rows + row) * group_size * head_dim * 4
                            last_row = min(num_rows, row + step)
                            attend(
                                args, spans[index], (head, head + 1), row, last_row, queries + place, thread
                            )

    return attention


def _rotate_kernel(head_dim: int, dtype: str) -> Any:
    half = head_dim // 2
    stored, single = vectors(half, dtype), vectors(half, "float32")
    load, store, keep, table = stored.load, stored.store, single.store, single.load
    splat, sub, mul, fma, total = (
        single.splat, single.sub, single.mul, single.fma, single.sum
    )  # fmt: skip

    @kernel()
    def rotate(args: Any, span: Any, first_head: int, last_head: int, queries: int) -> None:
        """Norms and rotates; puts scaled queries at ``queries``, keys and values into the cache."""
        qkv, cache, norm = args[_QKV], args[_CACHE], args[_NORM]
        num_kv_heads, group_size = args[_NUM_KV_HEADS], args[_GROUP_SIZE]
        num_heads = num_kv_heads * group_size
        row_size, slot_size = (num_heads + 2 * num_kv_heads) * head_dim, 2 * num_kv_heads * head_dim
        scale_eps = args.view(np.float32)[2 * _SCALE_EPS :]
        runs = carray(as_pointer(args[_RUNS]), (span[_FIRST_RUN] + span[_NUM_RUNS], 3), np.int64)
        branches = carray(as_pointer(args[_BRANCHES]), (span[_FIRST_BRANCH] + span[_NUM_ROWS], 4), np.int64)
        scale = splat(scale_eps[0])
        run, kept = span[_FIRST_RUN], 0
        for index in range(span[_NUM_ROWS]):
            position, row = span[_START] + index, (span[_FIRST_ROW] + index) * row_size
            place = position
            if span[_FIRST_BRANCH] >= 0:
                position = branches[span[_FIRST_BRANCH] + index, _POSITION]
                place = branches[span[_FIRST_BRANCH] + index, _PLACE]
            while runs[run, 1] <= place:
                run += 1
            slot = (runs[run, 2] + place - runs[run, 0]) * slot_size
            cos, sin = table(args[_COS], position * half), table(args[_SIN], position * half)
            # The query heads of each kv head, then the kv head itself.
            for head in range(first_head, last_head):
                for member in range(group_size + 1):
                    is_key = member == group_size
                    number = num_heads + head if is_key else head * group_size + member
                    at = row + number * head_dim
                    low, high = load(qkv, at), load(qkv, at + half)
                    if norm:
                        mean = total(fma(low, low, mul(high, high))) / np.float32(head_dim)
                        factor = splat(_ONE / np.sqrt(mean + scale_eps[1]))
                        low = mul(mul(low, factor), load(norm, number * head_dim))
                        high = mul(mul(high, factor), load(norm, number * head_dim + half))
                    new_low = sub(mul(low, cos), mul(high, sin))
                    new_high = fma(high, cos, mul(low, sin))
                    if is_key:
                        store(cache, slot + head * head_dim, new_low)
                        store(cache, slot + head * head_dim + half, new_high)
                    else:
                        # Grouped by kv head, then row, then member.
                        kept = ((head - first_head) * span[_NUM_ROWS] + index) * group_size + member
                        keep(queries, kept * head_dim, mul(new_low, scale))
                        keep(queries, kept * head_dim + half, mul(new_high, scale))
                value = row + (num_heads + num_kv_heads + head) * head_dim
                copy = slot + (num_kv_heads + head) * head_dim
                store(cache, copy, load(qkv, value))
                store(cache, copy + half, load(qkv, value + half))

    return rotate


def _attend_kernel(head_dim: int, dtype: str) -> Any:
    stored, single = vectors(head_dim, dtype), vectors(head_dim, "float32")
    load, store = stored.load, stored.store
    fetch, keep, splat, mul, fma = single.load, single.store, single.splat, single.mul, single.fma
    scores, softmax, item_size = scores_kernel(head_dim), softmax_kernel(), 2 if dtype == "bfloat16" else 4
    zero, query_bytes = np.float32(0.0), head_dim * 4

    @kernel()
    def attend(
        args: Any, span: Any, heads: tuple[int, int], first_row: int, last_row: int, queries: int, thread: int
    ) -> None:
        """Attends with some rows and heads of a span.

        Args:
            heads: first and last + 1 of the kv heads.
            queries: address of what ``rotate`` has left: float32, kv head after kv head, row after row.
        """
        cache, window = args[_CACHE], args[_WINDOW]
        num_kv_heads, group_size = args[_NUM_KV_HEADS], args[_GROUP_SIZE]
        first_head, last_head = heads
        slot_size, num_heads = 2 * num_kv_heads * head_dim, num_kv_heads * group_size
        num_queries = (last_row - first_row) * group_size
        start, end, branch = span[_START] + first_row, span[_START] + last_row, span[_FIRST_BRANCH]
        branches = carray(as_pointer(args[_BRANCHES]), (branch + last_row, 4), np.int64)
        if branch >= 0:
            start, end = span[_START], branches[branch + last_row - 1, _PLACE] + 1
        first_position = max(0, start - window + 1) if window else 0
        stride = (end + TILE - 1) // TILE * TILE
        num_all = (last_head - first_head) * num_queries
        sums = args[_SCRATCH] + (thread * args[_SCRATCH_SIZE] + args[_NUM_QUERY_NUMBERS]) * 4
        tile = sums + num_all * head_dim * 4
        weights_address = tile + TILE * head_dim * 4
        # A tile may end behind the last token; a factor for the sum lies there afterwards.
        weights_size = stride + TILE
        weights = carray(as_pointer(weights_address), (num_all, weights_size), np.float32)
        last_run = span[_FIRST_RUN] + span[_NUM_RUNS]
        runs = carray(as_pointer(args[_RUNS]), (last_run, 3), np.int64)

        for run in range(span[_FIRST_RUN], last_run):
            shift = runs[run, 2] - runs[run, 0]
            last = min(end, runs[run, 1])
            for begin in range(max(first_position, runs[run, 0]), last, TILE):
                count = min(TILE, last - begin)
                for head in range(last_head - first_head):
                    key = (begin + shift) * slot_size + (first_head + head) * head_dim
                    for token in range(count):
                        keep(tile, token * head_dim, load(cache, key + token * slot_size))
                        ahead = cache + (key + (token + TILE) * slot_size) * item_size
                        for byte in range(0, head_dim * item_size, _LINE):
                            prefetch(ahead + byte)
                    # Two queries for each look at a key.
                    for index in range(head * num_queries, (head + 1) * num_queries, 2):
                        other = min(index + 1, (head + 1) * num_queries - 1)
                        query, other_query = queries + index * query_bytes, queries + other * query_bytes
                        found = weights_address + (index * weights_size + begin) * 4
                        other_found = weights_address + (other * weights_size + begin) * 4
                        scores(query, other_query, tile, found, other_found)

        for index in range(num_all):
            member = index % num_queries // group_size
            position = start + member
            highest = own_first = own_last = position + 1
            if branch >= 0:
                line = branches[branch + first_row + member]
                position, highest, own_first, own_last = (
                    line[_POSITION], line[_TRUNK_LEN], line[_FIRST_PLACE], line[_PLACE] + 1
                )  # fmt: skip
            lowest = max(0, position - window + 1) if window else 0
            if lowest > highest:
                own_first, lowest = own_first + lowest - highest, highest
            row = weights_address + index * weights_size * 4
            softmax(weights, row, index, first_position, (lowest, highest, own_first, own_last))
            keep(sums, index * head_dim, splat(zero))

        for run in range(span[_FIRST_RUN], last_run):
            shift = runs[run, 2] - runs[run, 0]
            last = min(end, runs[run, 1])
            for begin in range(max(first_position, runs[run, 0]), last, TILE):
                count = min(TILE, last - begin)
                for head in range(last_head - first_head):
                    value = (begin + shift) * slot_size + (num_kv_heads + first_head + head) * head_dim
                    for token in range(count):
                        keep(tile, token * head_dim, load(cache, value + token * slot_size))
                        ahead = cache + (value + (token + TILE) * slot_size) * item_size
                        for byte in range(0, head_dim * item_size, _LINE):
                            prefetch(ahead + byte)
                    for index in range(head * num_queries, (head + 1) * num_queries, 2):
                        other = min(index + 1, (head + 1) * num_queries - 1)
                        weighted, other_weighted = (
                            fetch(sums, index * head_dim),
                            fetch(sums, other * head_dim),
                        )
                        for token in range(count):
                            number = fetch(tile, token * head_dim)
                            weight, other_weight = (
                                weights[index, begin + token],
                                weights[other, begin + token],
                            )
                            weighted = fma(splat(weight), number, weighted)
                            other_weighted = fma(splat(other_weight), number, other_weighted)
                        keep(sums, index * head_dim, weighted)
                        keep(sums, other * head_dim, other_weighted)

        for index in range(num_all):
            row = span[_FIRST_ROW] + first_row + index % num_queries // group_size
            head = (first_head + index // num_queries) * group_size + index % group_size
            factor = splat(weights[index, weights_size - TILE])
            store(args[_OUT], (row * num_heads + head) * head_dim, mul(factor, fetch(sums, index * head_dim)))

    return attend
