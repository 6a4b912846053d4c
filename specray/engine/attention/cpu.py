"""The decoder's attention on CPU: one kernel from the qkv to the output projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specray.engine.cpu.attention.kernel import AttentionCall
from specray.engine.cpu.attention.span import Span

if TYPE_CHECKING:
    from specray.engine.attention.base import HeadNorm
    from specray.engine.cpu.attention.kernel import AttentionKernel
    from specray.engine.cpu.gemm.rows import PackedRows
    from specray.engine.cpu.thread_pool import ThreadPool
    from specray.engine.step import AttentionStep, KVCache

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines."""


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """Implements ``base.Attention``.

    Args:
        kernel: ``attention_kernel`` of the heads' size and data type.
        num_kv_heads: with latents, groups of query heads that a thread takes together.
        cos, sin: of the first half of what is rotated, ``[max_model_len, head_dim / 2]``, float32.
        scale: factor on the dot products.
        layer_tables: ``cos`` and ``sin`` of each layer; None: they are the same for all.
    """

    kernel: AttentionKernel
    thread_pool: ThreadPool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float
    layer_tables: tuple[Tables, ...] | None = None

    def prepare(self, step: AttentionStep, positions: object) -> CpuAttentionStep:
        """What the layers of one step share."""
        block_size = step.cache.block_size
        spans = [
            Span(
                rows.start,
                rows.first_row,
                rows.num_rows,
                list(_runs(rows.block_ids, rows.end, block_size)),
                rows.visibility,
            )
            for rows in step.rows
        ]
        call = AttentionCall(
            self.kernel,
            self.thread_pool,
            spans,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tables=(self.cos, self.sin),
            scale=self.scale,
        )
        block_ids = [rows.block_ids for rows in step.rows]
        return CpuAttentionStep(step.cache, call, self.head_dim, block_ids, self.layer_tables)


@dataclass(frozen=True, slots=True)
class CpuAttentionStep:
    """Implements ``base.StepAttention``."""

    cache: KVCache
    call: AttentionCall
    head_dim: int
    block_ids: Sequence[Sequence[int]]
    """Block ids of each sequence."""
    layer_tables: tuple[Tables, ...] | None = None

    def advanced(self, kept: Sequence[int]) -> CpuAttentionStep | None:
        """The step after, of some of the sequences (``AttentionCall.advance``); this one is no more then.

        Returns:
            None where a token does not lie after the one before, or there is no room.
        """
        block_size, block_ids = self.cache.block_size, [self.block_ids[index] for index in kept]
        ends = self.call.starts[list(kept)] + 1
        for index in np.flatnonzero(ends % block_size == 0):
            block = ends[index] // block_size
            if block_ids[index][block] != block_ids[index][block - 1] + 1:
                return None
        return replace(self, block_ids=block_ids) if self.call.advance(kept) else None

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.layer_tables is not None:
            self.call.rotate_by(*self.layer_tables[layer])
        heads = qkv.view(len(qkv), -1, self.head_dim)
        # Of latents there is one head beside the queries.
        out = self.call(heads, self.cache.layers[layer], _norm(head_norm), window, sinks)
        return out.view(len(qkv), -1)

    def attend_packed(
        self, layer: int, qkv: PackedRows, head_norm: HeadNorm | None, window: int | None
    ) -> PackedRows:
        """Attends for packed rows, where the kernel takes them."""
        if self.layer_tables is not None:
            self.call.rotate_by(*self.layer_tables[layer])
        return self.call.packed(qkv, self.cache.layers[layer], _norm(head_norm), window)


def _norm(head_norm: HeadNorm | None) -> tuple[torch.Tensor, float] | None:
    return None if head_norm is None else (head_norm.weight, head_norm.eps)


def _runs(block_ids: Sequence[int], end: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """The positions ``0..end - 1`` as pieces whose slots follow each other."""
    first = 0
    for index in range(1, -(-end // block_size)):
        if block_ids[index] != block_ids[index - 1] + 1:
            yield first, index * block_size, _slot(block_ids, first, block_size)
            first = index * block_size
    yield first, end, _slot(block_ids, first, block_size)


def _slot(block_ids: Sequence[int], position: int, block_size: int) -> int:
    return block_ids[position // block_size] * block_size + position % block_size
