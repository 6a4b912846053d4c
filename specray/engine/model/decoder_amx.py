"""The decoder of AMX kernels: rows stay packed as AMX takes them, from the tokens to the logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.attention.cpu import CpuAttention
from specray.engine.cpu.gemm import rows as packing
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear
from specray.engine.cpu.gemm.rows import PackedRows
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.decoder import DecoderForward, Embedding
from specray.engine.step import CacheShape, ForwardOutput, Step


@dataclass(frozen=True, slots=True)
class _AmxLayer:
    input_norm: FusedRMSNorm
    qkv: TiledLinear
    head_norm: HeadNorm | None
    output: TiledLinear
    post_attention_norm: FusedRMSNorm
    gate: TiledGate
    down: TiledLinear
    window: int | None


@dataclass(frozen=True, slots=True)
class AmxDecoderForward:
    """Computes what its ``DecoderForward`` does, bit for bit."""

    name: str
    cache_shape: CacheShape
    embedding: Embedding
    layers: tuple[_AmxLayer, ...]
    final_norm: FusedRMSNorm
    head: TiledLinear
    attention: CpuAttention

    is_recurrent = False

    def stepping(self, step: Step) -> AbstractContextManager[None]:
        """Nothing is needed around a forward."""
        return nullcontext()

    def __call__(self, step: Step) -> ForwardOutput:
        return self.decode(self.embedding(step.token_ids), step)

    def decode(self, hidden: torch.Tensor, step: Step) -> ForwardOutput:
        """Computes the output, without features, from the embedded tokens, ``[num_rows, hidden_size]``."""
        attention, thread_pool = (
            self.attention.prepare(step.attention, step.positions),
            self.attention.thread_pool,
        )
        last = len(self.layers) - 1
        rows = packing.pack(hidden, thread_pool)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.packed(layer.input_norm.packed(rows))
            attended = attention.attend_packed(index, qkv, layer.head_norm, layer.window)
            if index == last and step.logit_rows is not None:
                # As in ``DecoderForward``: nothing more is needed of the others.
                attended, rows = _take(attended, step, thread_pool), _take(rows, step, thread_pool)
            rows = layer.output.packed_plus(attended, rows)
            gated = layer.gate.packed(layer.post_attention_norm.packed(rows))
            rows = layer.down.packed_plus(gated, rows)
        return ForwardOutput(self.head.packed_precise(self.final_norm.packed(rows)))


def _take(rows: PackedRows, step: Step, thread_pool: ThreadPool) -> PackedRows:
    wanted = step.logit_rows
    if isinstance(wanted, slice):
        assert wanted.stop is None or wanted.stop == rows.num_rows, "wanted rows are the last ones"
        return packing.last_rows(rows, wanted.start, thread_pool)
    assert wanted is not None
    return packing.some_rows(rows, wanted, thread_pool)


def packed(forward: DecoderForward) -> AmxDecoderForward | None:
    """The forward with packed rows, if its kernels take them. Linear layers do, if attention does.

    Args:
        forward: of kernels alone.
    """
    attention = forward.attention
    assert isinstance(attention, CpuAttention), "attention is a kernel"
    if not attention.kernel.can_be_packed or forward.feature_layers:
        return None
    if forward.is_recurrent or any(layer.sinks is not None for layer in forward.layers):
        return None
    layers = tuple(
        _AmxLayer(
            cast("FusedRMSNorm", layer.input_norm),
            cast("TiledLinear", layer.qkv),
            layer.head_norm,
            cast("TiledLinear", layer.output),
            cast("FusedRMSNorm", layer.post_attention_norm),
            cast("TiledGate", layer.gate),
            cast("TiledLinear", layer.down),
            layer.window,
        )
        for layer in forward.layers
    )
    return AmxDecoderForward(
        forward.name,
        forward.cache_shape,
        forward.embedding,
        layers,
        cast("FusedRMSNorm", forward.final_norm),
        cast("TiledLinear", forward.head),
        attention,
    )
