"""The decoder's parts as compiled kernels; what they do not cover is torch's. Importing it needs numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING

import numpy as np
import torch

from specray.engine.activation import Activation, Joint
from specray.engine.attention.cpu import CpuAttention
from specray.engine.cpu.attention.attend import MAX_QUERIES
from specray.engine.cpu.attention.kernel import attention_kernel
from specray.engine.cpu.experts.choose import Choice, choose
from specray.engine.cpu.experts.grouped import Group, GroupableLayer, KernelExperts
from specray.engine.cpu.experts.plan import add_rows
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear, can_tile
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear
from specray.engine.cpu.heads import KernelHeadProduct
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.cpu.row_gate import NUM_ARGS, gate_kernel, square_kernel
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.layers.convolution import ShortConvolution
from specray.engine.model.layers.delta import DeltaInputs
from specray.engine.model.layers.experts.config import Groups, Score
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.latent.projections import LatentQueries
from specray.engine.model.layers.mixers.kernels import KernelConvolution, KernelMixer
from specray.engine.model.layers.mixers.mamba import Mamba
from specray.engine.model.linear import AroundLinear
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.weights.stored_weight import Weight, numbers_of

if TYPE_CHECKING:
    from specray.engine.attention.base import Attention
    from specray.engine.model.decoder import Norm, RowGate
    from specray.engine.model.layers.delta import Mixer
    from specray.engine.model.layers.latent.projections import HeadProduct
    from specray.engine.model.layers.mixer_lowering import PlainMixer
    from specray.engine.model.layers.normed import Rows
    from specray.engine.model.linear import Gate, Linear
    from specray.engine.model.rotary import RotaryTables
    from specray.engine.step import HeadShape


_MIN_SHARED_SIZE = 65_536
"""Numbers from which on a second thread pays off."""


def _lanes(size: int) -> int:
    return next(lanes for lanes in (16, 8, 4, 2, 1) if size % lanes == 0)


class KernelSquared(AroundLinear):
    """Implements ``linear.Gate`` where there is no gate."""

    def __init__(self, linear: Linear, dtype: torch.dtype, thread_pool: ThreadPool) -> None:
        self.linear = linear
        self._thread_pool = thread_pool
        self._number_format = str(dtype).removeprefix("torch.")
        self._args = np.zeros(NUM_ARGS, dtype=np.int64)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Not thread-safe."""
        out = self.linear(rows)
        assert out.is_contiguous(), "rows follow each other"
        self._args[:] = 0, out.data_ptr(), out.numel()
        is_shared = out.numel() >= _MIN_SHARED_SIZE
        self._thread_pool.run(
            square_kernel(self._number_format, _lanes(out.shape[1])),
            self._args.ctypes.data,
            self._thread_pool.size if is_shared else 1,
        )
        return out


class KernelRowGate:
    """Implements ``decoder.RowGate``."""

    def __init__(
        self, linear: Linear, dtype: torch.dtype, thread_pool: ThreadPool, size: int, width: int = 1
    ) -> None:
        self.linear = linear
        self._thread_pool = thread_pool
        lanes = _lanes(size if width == 1 else width)
        self._kernel = gate_kernel(str(dtype).removeprefix("torch."), lanes, width)
        self._args = np.zeros(NUM_ARGS, dtype=np.int64)

    def __call__(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Not thread-safe."""
        gates = self.linear(rows)
        assert gates.is_contiguous() and attended.is_contiguous(), "rows follow each other"
        self._args[:] = gates.data_ptr(), attended.data_ptr(), attended.numel()
        is_shared = attended.numel() >= _MIN_SHARED_SIZE
        self._thread_pool.run(
            self._kernel, self._args.ctypes.data, self._thread_pool.size if is_shared else 1
        )
        return attended

    def with_linear(self, linear: Linear) -> KernelRowGate:
        other = copy(self)
        other.linear, other._args = linear, self._args.copy()
        return other


class KernelOperators(TorchOperators):
    """Implements ``operators.Operators`` on CPU.

    Args:
        num_threads: that work through the parts of a kernel.
        thread_pool: of other kernels that the same thread runs; None: one of its own.
    """

    def __init__(self, dtype: torch.dtype, num_threads: int, thread_pool: ThreadPool | None = None) -> None:
        super().__init__(dtype)
        self.thread_pool = thread_pool or ThreadPool(num_threads)

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        numbers = numbers_of(weight, self.dtype)
        if can_tile(numbers):
            return TiledLinear(numbers, bias, self.thread_pool)
        return super().linear(numbers, bias)

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        both = numbers_of(gate, self.dtype), numbers_of(up, self.dtype)
        if can_tile(both[0]):
            return TiledGate(*both, gate_bias, up_bias, self.thread_pool, joint)
        return super().gate(*both, gate_bias, up_bias, joint)

    def router(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        if weight.dtype == torch.float32 and self.dtype == torch.bfloat16:
            short = weight.bfloat16()
            if can_tile(short) and torch.equal(short.float(), weight):
                return WideRouterLinear(TiledLinear(short, bias, self.thread_pool))
        # Not what a class of quantised layers makes of ``linear``.
        return KernelOperators.linear(self, weight, bias)

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        gates = _groupable([each.gate for each in experts])
        downs = _groupable([each.down for each in experts])
        if gates is None or downs is None:
            return super().experts(router, experts)
        groups = Group(gates, self.thread_pool), Group(downs, self.thread_pool)
        chooses = KernelRouter.of(router, self.thread_pool, self.dtype) or router
        hidden_size = experts[0].gate.in_features
        return ExpertLayer(chooses, KernelExperts(*groups, hidden_size, self.thread_pool))

    def row_gate(self, linear: Linear, size: int, width: int = 1) -> RowGate:
        return KernelRowGate(linear, self.dtype, self.thread_pool, size, width)

    def mixer(self, mixer: PlainMixer) -> Mixer:
        if isinstance(mixer, ShortConvolution):
            return KernelConvolution(mixer, self.dtype, self.thread_pool)
        if isinstance(mixer, Mamba) and mixer.norm is not None and mixer.norm.is_first:
            return mixer
        return KernelMixer(mixer, self.dtype, self.thread_pool)

    def squared(self, linear: Linear) -> Gate:
        return KernelSquared(linear, self.dtype, self.thread_pool)

    def head_product(self, weight: torch.Tensor) -> HeadProduct:
        return KernelHeadProduct(weight, self.thread_pool)

    def inputs(self, made: LatentQueries | DeltaInputs) -> Rows:
        if isinstance(made, LatentQueries):
            return KernelLatentQueries.of(made, self.thread_pool)
        pool = self.thread_pool
        gates, decays = made.gates, made.decays
        assert isinstance(gates, KernelHeadProduct) and isinstance(decays, KernelHeadProduct), "made here"
        copies = KernelHeadProduct(torch.empty(1, 0, 0, dtype=self.dtype), pool)
        return KernelDeltaInputs(made.linear, gates, decays, copies, pool)

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return FusedRMSNorm(weight, eps, self.thread_pool, self.dtype)

    def attention(self, tables: RotaryTables, shape: HeadShape) -> Attention:
        half = (shape.head_dim - shape.latent_dim) // 2
        kinds = [(cos[:, :half].contiguous(), sin[:, :half].contiguous()) for cos, sin in tables.kinds]
        layers = None if len(kinds) == 1 else tuple(kinds[kind] for kind in tables.of_layers)
        return CpuAttention(
            attention_kernel(
                shape.head_dim, str(self.dtype).removeprefix("torch."), latent_dim=shape.latent_dim
            ),
            self.thread_pool,
            shape.num_heads,
            _num_groups(shape, self.thread_pool.size) if shape.latent_dim else shape.num_kv_heads,
            shape.head_dim,
            *kinds[0],
            shape.scale,
            layers,
        )


@dataclass(frozen=True, slots=True)
class KernelLatentQueries(LatentQueries):
    """Latent queries in kernels alone."""

    keys: KernelHeadProduct
    latent_norm: FusedRMSNorm
    thread_pool: ThreadPool

    @classmethod
    def of(cls, queries: LatentQueries, thread_pool: ThreadPool) -> KernelLatentQueries:
        own = {field.name: getattr(queries, field.name) for field in fields_of(queries)}
        return cls(**own, thread_pool=thread_pool)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows, joined, rotated_dim = len(rows), self.down(rows), self.rotated_dim
        num_heads, plain_dim, latent_dim = self.keys.shape
        size = joined.shape[1] - latent_dim - rotated_dim
        first, latents = joined[:, :size], joined[:, size : size + latent_dim]
        if self.query_up is not None and self.query_norm is not None:
            first = self.query_up(self.query_norm(first))
        heads = first.as_strided(
            (num_rows, num_heads, plain_dim), (first.stride(0), plain_dim + rotated_dim, 1)
        )
        out = self.thread_pool.empty((num_rows, (num_heads + 1) * (latent_dim + rotated_dim)), joined.dtype)
        targets = out.view(num_rows, num_heads + 1, -1)
        self.keys.into(heads, targets[:, :num_heads, :latent_dim], rest=rotated_dim)
        self.latent_norm.into(latents, targets[:, num_heads, :latent_dim], rest=rotated_dim)
        return out


@dataclass(frozen=True, slots=True)
class KernelDeltaInputs(DeltaInputs):
    """A delta layer's inputs in kernels alone."""

    gates: KernelHeadProduct
    decays: KernelHeadProduct
    copies: KernelHeadProduct
    """Product of no numbers, which copies what lies behind."""
    thread_pool: ThreadPool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        joined = self.linear(rows)
        mixed, b, gates, decays = self.parts(joined)
        num_heads, _, value_dim = self.gates.shape
        sizes = [mixed.shape[1], num_heads * value_dim, num_heads, num_heads * self.decays.shape[2]]
        out = self.thread_pool.empty((len(rows), sum(sizes)), joined.dtype)
        targets = torch.split(out, sizes, 1)
        for source, target in ((mixed, targets[0]), (b, targets[2])):
            self.copies.into(source[:, None], target[:, None], rest=source.shape[1])
        self.gates.into(gates, targets[1].view(len(rows), num_heads, -1))
        self.decays.into(decays, targets[3].view(len(rows), num_heads, -1))
        return out


@dataclass(frozen=True, slots=True)
class KernelRouter:
    """Does what a ``routing.Router`` does, in kernels alone."""

    linear: TiledLinear | WideRouterLinear
    how: Choice
    choice_bias: torch.Tensor | None
    thread_pool: ThreadPool

    @classmethod
    def of(cls, router: Router, thread_pool: ThreadPool, dtype: torch.dtype) -> KernelRouter | None:
        """None: the router's linear layer is no kernel for rows of the model's ``dtype``."""
        routing, bias = router.routing, router.choice_bias
        linear = router.linear
        if not isinstance(linear, TiledLinear | WideRouterLinear):
            return None
        if isinstance(linear, TiledLinear) and (linear.weight.dtype != dtype or not linear.has_whole_blocks):
            return None
        groups = routing.groups or Groups(1, 1, 1)
        how = Choice(
            num_chosen=routing.num_chosen,
            has_sigmoid=routing.score is Score.SIGMOID,
            is_scored_last=routing.chooses_by_product,
            num_groups=groups.number,
            num_kept=groups.num_kept,
            num_summed=groups.num_summed,
            is_normed=routing.is_normed,
            is_rounded=routing.is_rounded and dtype == torch.bfloat16,
            epsilon=routing.epsilon,
            floor=routing.floor,
            scale=routing.scale,
        )
        return cls(linear, how, None if bias is None else bias.float().contiguous(), thread_pool)

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(self.linear(rows), self.choice_bias, self.how, self.thread_pool)


@dataclass(frozen=True, slots=True)
class WideRouterLinear:
    """Products of bfloat16 rows, or of these in float32, with a float32 weight that bfloat16 holds."""

    linear: TiledLinear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear.precise(rows if rows.dtype == torch.bfloat16 else rows.bfloat16())


@dataclass(frozen=True, slots=True)
class KernelSharedMlp:
    """Does what a ``shared_mlp.WithSharedMlp`` does, in kernels alone."""

    experts: ExpertLayer
    shared: ExpertMlp
    gate: TiledLinear | None
    thread_pool: ThreadPool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        shared, gate = self.shared(rows), None if self.gate is None else self.gate(rows)
        return add_rows(shared, self.experts(rows), self.thread_pool, gate)


def _num_groups(shape: HeadShape, num_threads: int) -> int:
    """Groups of query heads that share a reading of latents: one for each thread, but none too large."""
    most = max(1, min(MAX_QUERIES, shape.num_heads // num_threads))
    size = next(size for size in range(most, 0, -1) if shape.num_heads % size == 0)
    return shape.num_heads // size


def _groupable(layers: Sequence[object]) -> list[GroupableLayer] | None:
    """Layers whose kernels jobs can run; None: some are torch's."""
    found: list[GroupableLayer] = []
    for layer in layers:
        if isinstance(layer, TiledLinear | TiledGate):
            found.append(layer.product)
        elif isinstance(layer, QuantizedGate):
            found.append(layer.gated)
        elif isinstance(layer, QuantizedLinear) and layer.plain.is_groupable:
            found.append(layer.plain)
    return found if len(found) == len(layers) else None
