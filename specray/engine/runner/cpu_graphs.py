"""CPU graphs of the decoder: each shape of step runs as it is twice, then from a captured graph.

Sessions that propose as many tokens as they like make a step of another number of rows each time. With AMX,
16 rows take as long as one of them beyond the first 32, so numbers of rows are made up to multiples of 16:
some graphs serve all. What the further rows compute is nobody's; no row depends on another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specray.engine.attention.cpu import CpuAttention, CpuAttentionStep
from specray.engine.cpu.experts.grouped import KernelExperts
from specray.engine.cpu.experts.plan import RowSum
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear
from specray.engine.cpu.gemm.quantized.embedding import BlockEmbedding, QuantizedEmbedding
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear
from specray.engine.cpu.gemm.rows import HEIGHT
from specray.engine.cpu.graph import CpuGraph
from specray.engine.cpu.memory_pool import MemoryPool
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.model.adapters.layers import KernelLayer
from specray.engine.model.decoder import DecoderForward, DecoderLayer, states_of
from specray.engine.model.decoder_amx import AmxDecoderForward, packed
from specray.engine.model.layers.experts.layer import ExpertLayer, Sum
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.model.layers.latent.projections import LatentOutput
from specray.engine.model.layers.mixers.kernels import KernelConvolution, KernelMixer
from specray.engine.model.layers.normed import Absent, NormedProjection
from specray.engine.model.layers.vocabulary import ScaledEmbedding, TableEmbedding
from specray.engine.model.operators_cpu import (
    KernelDeltaInputs,
    KernelLatentQueries,
    KernelRouter,
    KernelRowGate,
    KernelSharedMlp,
    KernelSquared,
)
from specray.engine.step import CacheShape, Forward, ForwardOutput, KVCache, Step

_MAX_ROWS = 320
"""Rows of a captured step, at most; beyond, Python between the kernels hardly counts."""
_MAX_GRAPHS = 256
_RUNS_BEFORE = 2
"""Runs of a shape before its capture, which takes 10 ms for a 200M target and saves 1 to 2 ms per run."""
_MAX_COUNTED = 4096
_FURTHER_ROWS = HEIGHT // 2
"""Rows beyond a block's height that take as long as one: a tile."""
_LOGIT_ROWS = 8
"""Multiple to which few logit rows are padded; what follows attention is a small part."""

KERNEL_LINEARS = TiledLinear, TiledGate, QuantizedLinear, QuantizedGate
"""Linear layers that one kernel computes."""
_Shape = tuple[int, int]
"""Number of rows, and number of last rows that get logits."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: CpuGraph
    hidden: torch.Tensor
    output: ForwardOutput
    """Output in the memory pool: valid until another graph runs."""
    cache: KVCache


class CpuGraphForward:
    """Implements ``step.Forward``. Not for two threads at once.

    Args:
        forward: of kernels only (see ``with_cpu_graphs``).
    """

    def __init__(
        self,
        forward: DecoderForward | AmxDecoderForward,
        attention: CpuAttention,
        embedding: TableEmbedding | ScaledEmbedding | QuantizedEmbedding | BlockEmbedding,
    ) -> None:
        self._forward = forward
        self._is_packed = isinstance(forward, AmxDecoderForward)
        self._attention = attention
        self._embedding = embedding
        self._memory_pool = MemoryPool()
        # Least recently used first.
        self._graphs: OrderedDict[_Shape, _Captured] = OrderedDict()
        self._num_runs: Counter[_Shape] = Counter()
        """Number of runs of each shape without a graph."""
        self._last: CpuAttentionStep | None = None
        """Attention of the last step, if a graph ran it with one row per sequence."""

    @property
    def shapes(self) -> list[_Shape]:
        """Shapes recorded so far: numbers of rows, and of last rows with logits."""
        return sorted(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Memory of all recordings, in bytes."""
        return self._memory_pool.num_bytes

    @property
    def name(self) -> str:
        return self._forward.name

    @property
    def cache_shape(self) -> CacheShape:
        return self._forward.cache_shape

    def __call__(self, step: Step) -> ForwardOutput:
        with self._forward.stepping(step):
            return self._run(step)

    def _run_plain(self, step: Step) -> ForwardOutput:
        return self._forward.decode(self._forward.embedding(step.token_ids), step)

    def _run(self, step: Step) -> ForwardOutput:
        num_rows, self._last = len(step.token_ids), None
        if num_rows > _MAX_ROWS or isinstance(step.logit_rows, torch.Tensor):
            return self._run_plain(step)
        if self._forward.is_recurrent and states_of(step).has_settled_rows:
            return self._run_plain(step)
        first = 0 if step.logit_rows is None else step.logit_rows.start
        shape = self._shape(num_rows, first)
        captured = self._graphs.get(shape)
        if captured is None or captured.cache is not step.attention.cache:
            if not self._is_due(shape):
                return self._run_plain(step)
            captured = self._capture(shape, step)
        else:
            self._graphs.move_to_end(shape)
            self._embedding.into(step.token_ids, captured.hidden[:num_rows])
            attention = self._attention.prepare(step.attention, step.positions)
            captured.graph.run(attention.call)
            rows = step.attention.rows
            if first == 0 and len(rows) == num_rows and not any(item.visibility for item in rows):
                self._last = attention
        begin = shape[0] - shape[1]
        # A copy, since the next step overwrites them.
        logits, features = captured.output
        if features is not None:
            features = {layer: rows[:num_rows].clone() for layer, rows in features.items()}
        return ForwardOutput(logits[first - begin : num_rows - begin].clone(), features)

    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> ForwardOutput | None:
        """The step after the one before: a further token of some of its sequences, which had one row each.

        Returns:
            The output, there until the next step; None where ``run`` has to plan it.
        """
        before, self._last = self._last, None
        if self._forward.is_recurrent:
            return None
        captured = self._graphs.get(self._shape(len(kept), 0))
        if before is None or captured is None or captured.cache is not before.cache:
            return None
        attention = before.advanced(kept)
        if attention is None:
            return None
        self._embedding.into(torch.tensor(token_ids), captured.hidden[: len(kept)])
        captured.graph.run(attention.call)
        self._last = attention
        logits, features = captured.output
        if features is not None:
            features = {layer: rows[: len(kept)] for layer, rows in features.items()}
        return ForwardOutput(logits[: len(kept)], features)

    def _shape(self, num_rows: int, first: int) -> _Shape:
        """Returns the shape of the graph for that many rows, of which those from ``first`` on want logits."""
        if not self._is_packed:
            return num_rows, num_rows - first
        rows = _made_up(num_rows, _FURTHER_ROWS) if num_rows > HEIGHT else num_rows
        wanted = rows - first
        if wanted == rows:
            return rows, rows
        return rows, min(rows, _made_up(wanted, _FURTHER_ROWS if wanted > HEIGHT else _LOGIT_ROWS))

    def _is_due(self, shape: _Shape) -> bool:
        if len(self._num_runs) == _MAX_COUNTED:
            self._num_runs.clear()
        self._num_runs[shape] += 1
        return self._num_runs[shape] > _RUNS_BEFORE

    def _capture(self, shape: _Shape, step: Step) -> _Captured:
        thread_pool = self._attention.thread_pool
        graph = CpuGraph(thread_pool, self._attention.kernel, self._memory_pool)
        rows, wanted = shape
        further = step.token_ids.new_zeros(rows - len(step.token_ids))
        hidden = self._forward.embedding(torch.cat((step.token_ids, further)))
        thread_pool.recorder = graph
        try:
            output = self._forward.decode(hidden, replace(step, logit_rows=slice(rows - wanted, None)))
        finally:
            thread_pool.recorder = None
        graph.finish()
        captured = self._graphs[shape] = _Captured(graph, hidden, output, step.attention.cache)
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return captured


def _made_up(number: int, step: int) -> int:
    return -(-number // step) * step


def with_cpu_graphs(forward: Forward) -> CpuGraphForward | None:
    """The forward with its shapes captured, if it is made of kernels alone; else None."""
    if not isinstance(forward, DecoderForward) or not isinstance(forward.attention, CpuAttention):
        return None
    attention = forward.attention
    norms: list[object] = [forward.final_norm]
    linears: list[object] = [forward.head]
    forward = replace(forward, layers=tuple(_with_kernels(layer) for layer in forward.layers))
    for layer in forward.layers:
        norms += [layer.input_norm, layer.post_attention_norm]
        linears.append(layer.gate)
        if isinstance(layer.qkv, KernelLatentQueries):
            linears += layer.qkv.linears
            norms.append(layer.qkv.query_norm or layer.qkv.latent_norm)
        else:
            linears.append(layer.qkv.linear if isinstance(layer.qkv, KernelDeltaInputs) else layer.qkv)
        if not all(isinstance(mixer, KernelMixer | KernelConvolution) for mixer in layer.mixers):
            return None
        if layer.shortcut is not None:
            return None
        if layer.beside is not None:
            linears += [layer.beside.linear, layer.beside.output]
        if layer.output_gate is not None:
            if not isinstance(layer.output_gate, KernelRowGate):
                return None
            linears.append(layer.output_gate.linear)
        for projection in (layer.output, layer.down):
            if isinstance(projection, NormedProjection):
                linears.append(projection.linear)
                norms.append(projection.norm)
            elif isinstance(projection, LatentOutput):
                linears.append(projection.linear)
            else:
                linears.append(projection)
    is_kernels = all(isinstance(norm, FusedRMSNorm | Absent) for norm in norms) and all(
        _is_one_kernel(linear) or _is_captured(linear) for linear in linears
    )
    if forward.feature_layers and (forward.residual_scale, forward.logit_scale) != (1.0, 1.0):
        # Features are multiplied by torch.
        is_kernels = False
    embeddings = TableEmbedding | ScaledEmbedding | QuantizedEmbedding | BlockEmbedding
    if not is_kernels or not isinstance(forward.embedding, embeddings):
        return None
    # Kernels write to tensors of their own; those of features stay until the next graph runs.
    embedding = forward.embedding
    forward = replace(forward, keeps_residuals=True)
    # Packed rows are not normed on their way to the residual stream.
    is_normed = any(isinstance(layer.output, NormedProjection) for layer in forward.layers)
    is_tiled = not is_normed and all(isinstance(linear, TiledLinear | TiledGate) for linear in linears)
    return CpuGraphForward((packed(forward) if is_tiled else None) or forward, attention, embedding)


def _is_one_kernel(linear: object) -> bool:
    """Whether a linear layer is, without padding by torch, or kernels with what adapters add."""
    linear = linear.linear if isinstance(linear, KernelSquared) else linear
    if isinstance(linear, KernelLayer):
        return _is_one_kernel(linear.base)
    return isinstance(linear, KERNEL_LINEARS) and getattr(linear, "has_whole_blocks", True)


def _with_kernels(layer: DecoderLayer) -> DecoderLayer:
    """The layer with a kernel in the place of torch's sum of its experts and the residual stream."""
    gate, routed = layer.gate, layer.routed
    if layer.shortcut is not None or routed is None or not isinstance(routed.experts, KernelExperts):
        return layer
    pool = routed.experts.thread_pool
    if isinstance(gate, WithSharedMlp) and isinstance(gate.gate, TiledLinear | None):
        layer = replace(layer, gate=KernelSharedMlp(routed, gate.shared, gate.gate, pool))
    if isinstance(layer.down, Sum) and layer.down.parallel is None:
        layer = replace(layer, down=RowSum(pool))
    return layer


def _is_captured(kind: object) -> bool:
    """Whether experts, and what adds them to the residual stream, are kernels."""
    if isinstance(kind, KernelSharedMlp):
        parts = kind.shared.gate, kind.shared.down
        return _is_captured(kind.experts) and all(_is_one_kernel(part) for part in parts)
    if isinstance(kind, ExpertLayer):
        around = () if kind.latent is None else (kind.latent.down, kind.latent.up)
        is_known = isinstance(kind.router, KernelRouter) and all(map(_is_one_kernel, around))
        return kind.can_be_captured and is_known
    return isinstance(kind, RowSum | Absent) or (isinstance(kind, Sum) and kind.parallel is None)
