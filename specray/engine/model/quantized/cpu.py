"""The decoder's parts on CPU with quantised weights, as compiled kernels. Importing it needs numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Activation, Joint
from specray.engine.cpu.gemm.quantized.check import check_kernels, check_part
from specray.engine.cpu.gemm.quantized.embedding import BlockEmbedding, QuantizedEmbedding, StoredEmbedding
from specray.engine.cpu.gemm.quantized.layout import Layout
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear
from specray.engine.cpu.gemm.quantized.panels import Panels, can_pack, pack
from specray.engine.model.operators_cpu import KernelOperators
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight, quantize
from specray.engine.weights.stored_weight import Part, StoredWeight, Weight

if TYPE_CHECKING:
    from specray.engine.model.decoder import Embedding
    from specray.engine.model.linear import Gate, Linear


class QuantizedKernelOperators(KernelOperators):
    """Implements ``operators.Operators``: quantises each weight as it comes.

    Args:
        others: whose threads do the work.

    Raises:
        ConfigError: this machine has no kernels for the format.
    """

    def __init__(self, others: KernelOperators, format: Quantization) -> None:
        check_kernels(format, others.dtype)
        self.dtype, self.thread_pool, self._format = others.dtype, others.thread_pool, format

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        return QuantizedLinear(self._quantized(weight), bias, self.thread_pool, self.dtype)

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        both = self._quantized(gate), self._quantized(up)
        return QuantizedGate(*both, gate_bias, up_bias, self.thread_pool, self.dtype, joint)

    def embedding(self, table: Weight, head: Linear | None) -> Embedding:
        """A table of look-ups in this format: the head's own weights where it has the same."""
        if isinstance(head, QuantizedLinear):
            return QuantizedEmbedding(head.panels[0], self.dtype)
        return QuantizedEmbedding(pack(self._quantized(table), self.thread_pool), self.dtype)

    def _quantized(self, weight: Weight) -> QuantizedWeight:
        numbers = weight.values(self.dtype) if isinstance(weight, StoredWeight) else weight
        return quantize(numbers, self._format)


class StoredKernelOperators(KernelOperators):
    """Implements ``operators.Operators``: what a file stores is computed in its own bits, where it has a
    layout, and with its values in the model's data type elsewhere.

    Args:
        others: whose threads do the work.

    Raises:
        ConfigError: a kernel does not compute what the weight's values give, or a weight is not finite.
    """

    def __init__(self, others: KernelOperators) -> None:
        self.dtype, self.thread_pool = others.dtype, others.thread_pool
        self._checked: set[Layout] = set()

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, torch.Tensor):
            return super().linear(weight, bias)
        if not can_pack(weight):
            return super().linear(weight.values(self.dtype), bias)
        linear = QuantizedLinear(weight, bias, self.thread_pool, self.dtype)
        self._check(weight.parts, linear.panels)
        return linear

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        if isinstance(gate, StoredWeight) and isinstance(up, StoredWeight):
            is_one = len(gate.parts) == len(up.parts) == 1
            if is_one and can_pack(gate) and can_pack(up):
                both = gate.parts[0], up.parts[0]
                made = QuantizedGate(*both, gate_bias, up_bias, self.thread_pool, self.dtype, joint)
                self._check(both, made.panels)
                return made
        numbers = [
            weight.values(self.dtype) if isinstance(weight, StoredWeight) else weight for weight in (gate, up)
        ]
        return super().gate(numbers[0], numbers[1], gate_bias, up_bias, joint)

    def embedding(self, table: StoredWeight, head: Linear | None) -> Embedding:
        """Look-ups in the file's rows, whether a head shares them or not."""
        part = table.parts[0]
        if len(table.parts) == 1 and isinstance(part, BlockWeight):
            return BlockEmbedding(part, self.thread_pool, self.dtype)
        return StoredEmbedding(table, self.dtype)

    def _check(self, parts: Sequence[Part], panels: Sequence[Panels]) -> None:
        for part, packed in zip(parts, panels, strict=True):
            if packed.layout not in self._checked:
                check_part(part, self.dtype)
                self._checked.add(packed.layout)
