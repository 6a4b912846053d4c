"""The decoder's parts as compiled kernels; what they do not cover is torch's. Importing it needs numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Activation
from specray.engine.attention.cpu import CpuAttention
from specray.engine.cpu.attention.kernel import attention_kernel
from specray.engine.cpu.gemm.grouped import group
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear, can_tile
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.weights.stored_weight import Weight, numbers_of

if TYPE_CHECKING:
    from specray.engine.attention.base import Attention
    from specray.engine.model.decoder import Norm
    from specray.engine.model.layers.experts import LayerGroup
    from specray.engine.model.linear import Gate, Linear, Weights
    from specray.engine.model.rotary import RotaryTables
    from specray.engine.step import HeadShape


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
        activation: Activation = Activation.SILU,
    ) -> Gate:
        both = numbers_of(gate, self.dtype), numbers_of(up, self.dtype)
        if can_tile(both[0]):
            return TiledGate(*both, gate_bias, up_bias, self.thread_pool, activation)
        return super().gate(*both, gate_bias, up_bias, activation)

    def router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        # Not what a class of quantised layers makes of ``linear``.
        return KernelOperators.linear(self, weight, bias)

    def group(self, layers: Sequence[Weights]) -> LayerGroup | None:
        return group(layers)

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return FusedRMSNorm(weight, eps, self.thread_pool, self.dtype)

    def attention(self, tables: RotaryTables, shape: HeadShape) -> Attention:
        half = shape.head_dim // 2
        kinds = [(cos[:, :half].contiguous(), sin[:, :half].contiguous()) for cos, sin in tables.kinds]
        layers = None if len(kinds) == 1 else tuple(kinds[kind] for kind in tables.of_layers)
        return CpuAttention(
            attention_kernel(shape.head_dim, str(self.dtype).removeprefix("torch.")),
            self.thread_pool,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            *kinds[0],
            shape.scale,
            layers,
        )
