"""Attention of a ragged step in one kernel per layer: head norms, rotary positions, cache write, attention.

Kv heads do not depend on each other, so a thread takes some kv heads of some sequences through all of it,
without waiting for the others. Keys and values are read once per sequence, token after token as they lie in
the cache, and every row and query head of the sequence is served from the registers and the first cache.
Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.kernels import attend as single
from specray.engine.kernels import fields, tiles
from specray.engine.kernels.flash import attend as flash
from specray.engine.kernels.simd import kernel, vectors
from specray.engine.kernels.span import Span
from specray.engine.kernels.team import Kernel, Team, as_pointer

_PARTS_PER_THREAD = 4
_MIN_SHARED_WORK = 32_768
"""Numbers of K and V to read, below which a second thread costs more than it brings."""

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
        kernel: AttentionKernel,
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
            num_at_once = min(num_queries, max(kernel.max_queries, group_size))
            num_scratch = max(num_scratch, kernel.scratch_size(num_at_once, num_kv_heads, head_dim, end))
        self._team = team
        is_shared = team.size > 1 and work * head_dim >= _MIN_SHARED_WORK
        self._num_parts = min(len(spans) * num_kv_heads, _PARTS_PER_THREAD * team.size) if is_shared else 1
        num_scratch += num_query_numbers
        # Zeros, as what nobody needs is computed with as well, and slowly with the least of numbers.
        scratch = torch.zeros(team.size * num_scratch)
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
        self._scale_eps = self._args.view(np.float32)[2 * fields.SCALE_EPS :]
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
        args[fields.QKV], args[fields.CACHE], args[fields.OUT] = (
            qkv.data_ptr(),
            cache.data_ptr(),
            out.data_ptr(),
        )
        args[fields.WINDOW] = window or 0
        if norm is not None:
            args[fields.NORM], self._scale_eps[1] = norm[0].data_ptr(), norm[1]
        self._team.run(self._kernel, self._args_address, self._num_parts)
        return out

    def retarget(self, args: np.ndarray) -> int:
        """Makes recorded calls of the same rows attend as this one would.

        Args:
            args: int64 ``[num_calls, arguments of the kernel]``.

        Returns:
            The number of parts.
        """
        args[:, fields.SPANS : fields.SCALE_EPS] = self._args[fields.SPANS : fields.SCALE_EPS]
        args[:, fields.BRANCHES] = self._args[fields.BRANCHES]
        return self._num_parts


class AttentionKernel(Kernel):
    """The kernel, and how much room it needs.

    Args:
        max_queries: query heads times rows that are served from one reading of keys and values.
        scratch_size: of queries of each kv head, kv heads, their size, and the end of a span.
    """

    __slots__ = ("max_queries", "scratch_size")

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        max_queries: int,
        scratch_size: Callable[[int, int, int, int], int],
    ) -> None:
        super().__init__(name, fields.NUM_ARGS, make)
        self.max_queries = max_queries
        self.scratch_size = scratch_size


def attention_kernel(head_dim: int, dtype: str) -> AttentionKernel:
    """The kernel for heads of ``head_dim`` numbers that are ``bfloat16`` or ``float32``."""
    # Asked in every process: code from the cache needs the system's permission too.
    return _attention_kernel(
        head_dim, dtype, dtype == "bfloat16" and flash.fits(head_dim) and tiles.is_usable()
    )


@cache
def _attention_kernel(head_dim: int, dtype: str, has_amx: bool) -> AttentionKernel:
    if has_amx:
        make_attend = partial(flash.attend_kernel, head_dim)
        name, max_queries, scratch_size = "amx", flash.MAX_QUERIES, flash.scratch_size
    else:
        make_attend = partial(single.attend_kernel, head_dim, dtype)
        name, max_queries, scratch_size = dtype, single.MAX_QUERIES, single.scratch_size
    make = partial(_make_attention, head_dim, dtype, make_attend, max_queries)
    return AttentionKernel(f"attention-{name}-{head_dim}", make, max_queries, scratch_size)


def _make_attention(head_dim: int, dtype: str, make_attend: Callable[[], Any], max_queries: int) -> Any:
    attend = make_attend()
    rotate = _rotate_kernel(head_dim, dtype)

    def attention(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (fields.NUM_ARGS,), np.int64)
        spans = carray(as_pointer(args[fields.SPANS]), (args[fields.NUM_SPANS], fields.NUM_COLUMNS), np.int64)
        num_kv_heads = args[fields.NUM_KV_HEADS]
        total = 0
        for index in range(len(spans)):
            total += spans[index, fields.COST] * num_kv_heads
        # The part's heads are those that begin in its share of the total cost.
        first, last = total * part // num_parts, total * (part + 1) // num_parts
        before = 0
        for index in range(len(spans)):
            cost = spans[index, fields.COST]
            first_head = min(num_kv_heads, max(0, (first - before + cost - 1) // cost))
            last_head = min(num_kv_heads, max(0, (last - before + cost - 1) // cost))
            before += cost * num_kv_heads
            if first_head < last_head:
                span, heads, after = spans[index], (first_head, last_head), spans[index]
                queries = args[fields.SCRATCH] + thread * args[fields.SCRATCH_SIZE] * 4
                rotate(args, span, first_head, last_head, queries)
                num_rows, group_size = span[fields.NUM_ROWS], args[fields.GROUP_SIZE]
                if num_rows * group_size <= max_queries:
                    if before < last and index + 1 < len(spans):
                        after = spans[index + 1]
                    attend(args, span, heads, (0, num_rows), queries, thread, after)
                else:
                    # Head by head and some rows at a time, so that the weights stay in the second cache.
                    step = max(1, max_queries // group_size)
                    for head in range(first_head, last_head):
                        for row in range(0, num_rows, step):
                            place = ((head - first_head) * num_rows + row) * group_size * head_dim * 4
                            rows = row, min(num_rows, row + step)
                            attend(args, span, (head, head + 1), rows, queries + place, thread, after)

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
        qkv, cache, norm = args[fields.QKV], args[fields.CACHE], args[fields.NORM]
        num_kv_heads, group_size = args[fields.NUM_KV_HEADS], args[fields.GROUP_SIZE]
        num_heads = num_kv_heads * group_size
        row_size, slot_size = (num_heads + 2 * num_kv_heads) * head_dim, 2 * num_kv_heads * head_dim
        scale_eps = args.view(np.float32)[2 * fields.SCALE_EPS :]
        runs = carray(
            as_pointer(args[fields.RUNS]), (span[fields.FIRST_RUN] + span[fields.NUM_RUNS], 3), np.int64
        )
        branches = carray(
            as_pointer(args[fields.BRANCHES]),
            (span[fields.FIRST_BRANCH] + span[fields.NUM_ROWS], 4),
            np.int64,
        )
        scale = splat(scale_eps[0])
        run, kept = span[fields.FIRST_RUN], 0
        for index in range(span[fields.NUM_ROWS]):
            position, row = span[fields.START] + index, (span[fields.FIRST_ROW] + index) * row_size
            place = position
            if span[fields.FIRST_BRANCH] >= 0:
                position = branches[span[fields.FIRST_BRANCH] + index, fields.POSITION]
                place = branches[span[fields.FIRST_BRANCH] + index, fields.PLACE]
            while runs[run, 1] <= place:
                run += 1
            slot = (runs[run, 2] + place - runs[run, 0]) * slot_size
            cos, sin = table(args[fields.COS], position * half), table(args[fields.SIN], position * half)
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
                        kept = ((head - first_head) * span[fields.NUM_ROWS] + index) * group_size + member
                        keep(queries, kept * head_dim, mul(new_low, scale))
                        keep(queries, kept * head_dim + half, mul(new_high, scale))
                value = row + (num_heads + num_kv_heads + head) * head_dim
                copy = slot + (num_kv_heads + head) * head_dim
                store(cache, copy, load(qkv, value))
                store(cache, copy + half, load(qkv, value + half))

    return rotate
