"""The decoder's parts on CPU with quantised weights, as compiled kernels. Importing it needs numba."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Activation
from specray.engine.cpu.gemm.quantized.check import check_kernels
from specray.engine.cpu.gemm.quantized.embedding import QuantizedEmbedding
from specray.engine.cpu.gemm.quantized.layout import pack_panels
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear
from specray.engine.model.operators_cpu import KernelOperators
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize

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

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return QuantizedLinear(quantize(weight, self._format), bias, self.thread_pool, self.dtype)

    def gate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: Activation = Activation.SILU,
    ) -> Gate:
        both = quantize(gate, self._format), quantize(up, self._format)
        return QuantizedGate(*both, gate_bias, up_bias, self.thread_pool, self.dtype, activation)

    def embedding(self, table: torch.Tensor, head: Linear | None) -> Embedding:
        """A table of look-ups in this format: the head's own weights where it has the same."""
        if isinstance(head, QuantizedLinear):
            return QuantizedEmbedding(head.weight, self._format, self.dtype)
        return QuantizedEmbedding(pack_panels(quantize(table, self._format)), self._format, self.dtype)
