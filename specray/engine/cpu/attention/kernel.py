"""Attention of a ragged step in one kernel per layer: q/k norm, RoPE, cache write, attention.

Kv heads are independent, so a thread takes some kv heads of some sequences through all stages without waiting
for other threads. Keys and values are read once per sequence, in cache order, and every row and query head of
the sequence uses them from registers and L1. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.cpu.attention import attend as vector
from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.amx import attend as amx
from specray.engine.cpu.attention.rope_cache import rope_cache_kernel
from specray.engine.cpu.attention.span import Span
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.rows import FlatRows, PackedRows
from specray.engine.cpu.simd import kernel
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer

_PARTS_PER_THREAD = 4
FURTHER_STEPS = 64
"""Further steps that a call has scratch for; after them it is built anew."""
MIN_SHARED_WORK = 32_768
"""Minimum number of K and V elements to read for which a second thread pays off."""


class AttentionCall:
    """The attention kernel applied to the rows of one step, layer by layer.

    Args:
        tables: cosines and sines, ``[max_model_len, head_dim / 2]`` each, float32.
        scale: factor on the dot products.
    """

    __slots__ = (
        "_args", "_args_address", "_kept", "_kernel", "_max_end", "_num_heads", "_num_parts", "_runs",
        "_scale_eps", "_table", "_thread_pool",
    )  # fmt: skip

    def __init__(
        self,
        kernel: AttentionKernel,
        thread_pool: ThreadPool,
        spans: Sequence[Span],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> None:
        group_size = num_heads // num_kv_heads
        all_runs = [run for span in spans for run in span.runs]
        row_spans = np.array(list(_row_spans(spans, all_runs)) if kernel.splits_trees else [], dtype=np.int64)
        runs = np.array(all_runs, dtype=np.int64)
        masks = np.array(
            [
                (row.position, row.kv_index, row.prefix_len, row.first_index, row.signed_ancestors)
                for span in spans
                for row in span.visibility
            ],
            dtype=np.int64,
        )
        columns, first_run, num_scratch, num_query_numbers, work, first_mask = [], 0, 0, 0, 0, 0
        for span in spans:
            end, num_runs = span.end, len(span.runs)
            num_queries = span.num_rows * group_size
            cost = end * (2 + num_queries)
            mask = first_mask if span.visibility else -1
            columns.append((span.start, span.first_row, span.num_rows, first_run, num_runs, cost, mask))
            first_run += num_runs
            first_mask += len(span.visibility)
            work += cost * num_kv_heads
            at_once = 1 if kernel.latent_dim else num_kv_heads
            num_query_numbers = max(num_query_numbers, num_queries * at_once * head_dim)
            # All heads when rows are few; else one head and a part of the rows.
            num_at_once = min(num_queries, max(kernel.max_queries, group_size))
            # Leave scratch for further steps.
            room = kernel.scratch_size(num_at_once, at_once, head_dim, end + FURTHER_STEPS)
            # A row of a tree that goes on alone needs no more than all rows together.
            is_split = kernel.splits_trees and span.visibility
            num_scratch = max(num_scratch, 2 * room if is_split else room)
        self._thread_pool = thread_pool
        is_shared = thread_pool.size > 1 and work * head_dim >= MIN_SHARED_WORK
        self._num_parts = (
            min(len(spans) * num_kv_heads, _PARTS_PER_THREAD * thread_pool.size) if is_shared else 1
        )
        num_scratch += num_query_numbers + APART // 4
        # Zeros, since unused lanes are computed too, and denormals would be slow.
        scratch = torch.zeros(thread_pool.size * num_scratch)
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
                masks.ctypes.data,
                *(0, 0, 0, 0, 0),
                row_spans.ctypes.data,
            ],
            dtype=np.int64,
        )
        self._scale_eps = self._args.view(np.float32)[2 * fields.SCALE_EPS :]
        self._scale_eps[0] = scale
        self._args_address = self._args.ctypes.data
        self._table, self._runs = table, runs
        self._kept = (masks, row_spans, scratch, tables)  # owners of memory that the arguments point to
        self._max_end = max(span.end for span in spans) + FURTHER_STEPS
        self._kernel = kernel
        self._num_heads = num_heads

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs one layer.

        Args:
            qkv: ``[num_rows, num_heads + 2 * num_kv_heads, head_dim]``, contiguous; with latents one more
                than ``num_heads``.
            cache: ``[num_slots, 2 * num_kv_heads, head_dim]``, contiguous; of latents
                ``[num_slots, head_dim]``.
            norm: weights of the q/k norm, ``[num_heads + num_kv_heads, head_dim]``, and its eps.
            window: a row sees itself and the ``window - 1`` positions before it; None: all before it.
            sinks: score of each query head's sink, ``[num_heads]``, float32; the caller keeps it. None: none.

        Returns:
            ``[num_rows, num_heads, head_dim]``, or the size of a latent.
        """
        size = self._kernel.latent_dim or qkv.shape[2]
        out = self._thread_pool.empty((qkv.shape[0], self._num_heads, size), qkv.dtype)
        rows = FlatRows(qkv.view(len(qkv), -1)), FlatRows(out.view(len(out), -1))
        self._attend(*rows, cache, norm, window, sinks)
        return out

    def packed(
        self,
        qkv: PackedRows,
        cache: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        window: int | None,
    ) -> PackedRows:
        """Runs one layer on packed rows; the kernel must accept them (``can_be_packed``)."""
        out = PackedRows.empty(self._thread_pool, qkv.num_rows, self._num_heads * cache.shape[-1])
        self._attend(qkv, out, cache, norm, window, None)
        return out

    def _attend(
        self,
        qkv: FlatRows | PackedRows,
        out: FlatRows | PackedRows,
        cache: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> None:
        args = self._args
        args[fields.QKV], args[fields.CACHE], args[fields.OUT] = qkv.address, cache.data_ptr(), out.address
        args[fields.QKV_STEP : fields.BLOCK_STEP + 1] = qkv.row_step, out.row_step, qkv.block_step
        args[fields.WINDOW] = window or 0
        args[fields.SINKS] = 0 if sinks is None else sinks.data_ptr()
        if norm is not None:
            args[fields.NORM], self._scale_eps[1] = norm[0].data_ptr(), norm[1]
            args[fields.IS_NORM_WIDE] = norm[0].dtype == torch.float32
        self._thread_pool.run(self._kernel, self._args_address, self._num_parts)

    def rotate_by(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Changes the tables for the layers that follow; the caller keeps them."""
        self._args[fields.COS], self._args[fields.SIN] = cos.data_ptr(), sin.data_ptr()

    @property
    def starts(self) -> np.ndarray:
        """Position of each sequence's first row, int64."""
        starts: np.ndarray = self._table[:, fields.START]
        return starts

    def advance(self, kept: Sequence[int]) -> bool:
        """Turns this into the next step's call: the kept sequences, in order, one token further each.

        Each sequence has one row, and its next token follows its last one in the cache.

        Returns:
            False if the scratch is too small; nothing has changed then.
        """
        table = self._table[list(kept)] if len(kept) < len(self._table) else self._table
        if table[:, fields.START].max() + 2 > self._max_end:
            return False
        table[:, fields.START] += 1
        table[:, fields.FIRST_ROW] = np.arange(len(table))
        self._runs[table[:, fields.FIRST_RUN] + table[:, fields.NUM_RUNS] - 1, 1] += 1
        group_size, num_kv_heads = self._args[fields.GROUP_SIZE], self._args[fields.NUM_KV_HEADS]
        table[:, fields.COST] += 2 + group_size
        self._table = table
        self._args[fields.SPANS], self._args[fields.NUM_SPANS] = table.ctypes.data, len(table)
        self._num_parts = min(self._num_parts, int(len(table) * num_kv_heads))
        return True

    def retarget(self, args: np.ndarray) -> int:
        """Points recorded calls with the same number of rows at this call's sequences.

        Args:
            args: int64 ``[num_calls, arguments of the kernel]``, changed in place.

        Returns:
            The number of parts.
        """
        args[:, fields.SPANS : fields.COS] = self._args[fields.SPANS : fields.COS]
        # Not the tables: they are each layer's own, and are the same in every step.
        args[:, fields.SCRATCH : fields.SCALE_EPS] = self._args[fields.SCRATCH : fields.SCALE_EPS]
        for field in (fields.MASKS, fields.ROW_SPANS):
            args[:, field] = self._args[field]
        return self._num_parts


def _row_spans(spans: Sequence[Span], runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, ...]]:
    """Columns of a span for each row of a tree, as if it were alone on a chain; adds its runs."""
    for span in spans:
        for row, seen in enumerate(span.visibility):
            own = span.path_runs(seen)
            yield seen.position, span.first_row + row, 1, len(runs), len(own), 0, -1
            runs += own


class AttentionKernel(Kernel):
    """The compiled kernel and its scratch size.

    Args:
        max_queries: query heads times rows that share one reading of keys and values.
        scratch_size: float32 per thread, from queries per kv head, kv heads, head size and end of a span.
        can_be_packed: whether its input and output may be packed rows.
        splits_trees: whether each row of a tree goes on alone after the prefix.
        latent_dim: first numbers of the key that all kv heads share, which are its value; 0: each has one.
    """

    __slots__ = ("can_be_packed", "latent_dim", "max_queries", "scratch_size", "splits_trees")

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        max_queries: int,
        scratch_size: Callable[[int, int, int, int], int],
        *,
        can_be_packed: bool,
        splits_trees: bool,
        latent_dim: int = 0,
    ) -> None:
        super().__init__(name, fields.NUM_ARGS, make)
        self.latent_dim = latent_dim
        self.can_be_packed = can_be_packed
        self.splits_trees = splits_trees
        self.max_queries = max_queries
        self.scratch_size = scratch_size


def attention_kernel(head_dim: int, dtype: str, latent_dim: int = 0) -> AttentionKernel:
    """Loads or compiles the kernel for heads of ``head_dim`` elements of ``bfloat16`` or ``float32``.

    Args:
        latent_dim: as of :class:`AttentionKernel`.
    """
    # Checked in every process: cached code needs the system's permission for AMX too.
    has_amx = dtype == "bfloat16" and not latent_dim and amx.fits(head_dim) and tiles.is_usable()
    return _attention_kernel(head_dim, dtype, has_amx, latent_dim)


@cache
def _attention_kernel(head_dim: int, dtype: str, has_amx: bool, latent_dim: int) -> AttentionKernel:
    if has_amx:
        make_attend = partial(amx.attend_kernel, head_dim)
        name, max_queries, scratch_size = "amx", amx.MAX_QUERIES, amx.scratch_size
    else:
        make_attend = partial(vector.attend_kernel, head_dim, dtype, latent_dim)
        name, max_queries, scratch_size = dtype, vector.MAX_QUERIES, vector.scratch_size
    make = partial(_make_attention, head_dim, dtype, make_attend, max_queries, latent_dim)
    return AttentionKernel(
        f"attention-{name}-{head_dim}{f'-{latent_dim}' if latent_dim else ''}",
        make,
        max_queries,
        scratch_size,
        can_be_packed=has_amx,
        splits_trees=has_amx,
        latent_dim=latent_dim,
    )


def _make_attention(
    head_dim: int, dtype: str, make_attend: Callable[[], Any], max_queries: int, latent_dim: int
) -> Any:
    attend = make_attend()
    rope_cache = rope_cache_kernel(head_dim, dtype, latent_dim)

    @kernel()
    def attend_heads(args: Any, span: Any, heads: tuple[int, int], thread: int) -> None:
        queries = args[fields.SCRATCH] + thread * args[fields.SCRATCH_SIZE] * 4
        rope_cache(args, span, heads[0], heads[1], queries)
        num_rows, group_size = span[fields.NUM_ROWS], args[fields.GROUP_SIZE]
        if num_rows * group_size <= max_queries:
            attend(args, span, heads, (0, num_rows), queries, thread)
            return
        # Head by head and some rows at a time, so that the weights stay in L2.
        step = max(1, max_queries // group_size)
        for head in range(heads[0], heads[1]):
            for row in range(0, num_rows, step):
                place = ((head - heads[0]) * num_rows + row) * group_size * head_dim * 4
                rows = row, min(num_rows, row + step)
                attend(args, span, (head, head + 1), rows, queries + place, thread)

    def attention(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (fields.NUM_ARGS,), np.int64)
        spans = carray(as_pointer(args[fields.SPANS]), (args[fields.NUM_SPANS], fields.NUM_COLUMNS), np.int64)
        num_kv_heads = args[fields.NUM_KV_HEADS]
        total = 0
        for index in range(len(spans)):
            total += spans[index, fields.COST] * num_kv_heads
        # A part takes the heads that begin in its share of the total cost.
        first, last = total * part // num_parts, total * (part + 1) // num_parts
        before = 0
        for index in range(len(spans)):
            cost = spans[index, fields.COST]
            first_head = min(num_kv_heads, max(0, (first - before + cost - 1) // cost))
            last_head = min(num_kv_heads, max(0, (last - before + cost - 1) // cost))
            before += cost * num_kv_heads
            if first_head < last_head:
                if latent_dim:
                    # Queries of many heads are large: those of one group at a time.
                    for head in range(first_head, last_head):
                        attend_heads(args, spans[index], (head, head + 1), thread)
                else:
                    attend_heads(args, spans[index], (first_head, last_head), thread)

    return attention
