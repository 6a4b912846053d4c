"""The work between a layer's matrix products, as Triton kernels. Importing it needs triton.

A captured forward of few rows still pays some microseconds for every operator: the activation of a gated pair
is one here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cuda.experts_triton import TritonExperts
from specray.engine.model.layers.experts import ExpertLayer, ExpertMlp
from specray.engine.model.layers.routing import Router
from specray.engine.model.linear import Gate, JoinedGate, PlainLinear
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.weights.stored_weight import Weight, numbers_of

_COLUMNS = 1024


@triton.jit
def _activate(both, out, size, HAS_TANH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    gate = tl.load(both + row * 2 * size + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + column, mask=is_column, other=0.0).to(tl.float32)
    exponent = gate
    if HAS_TANH:
        # As in ``cpu.gemm.epilogue``: twice the hyperbolic tangent's argument.
        exponent = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    product = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=is_column)


class TritonGate(JoinedGate):
    """A gated pair whose activation is one kernel."""

    __slots__ = ()

    def joined(self, both: torch.Tensor) -> torch.Tensor:
        num_rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty(num_rows, size, dtype=both.dtype, device=both.device)
        _activate[(num_rows, triton.cdiv(size, _COLUMNS))](
            both, out, size, HAS_TANH=self.joint is Activation.GELU_TANH, COLUMNS=_COLUMNS
        )
        return out


class TritonOperators(TorchOperators):
    """Implements ``operators.Operators`` on CUDA."""

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        if isinstance(joint, Clamp):
            return super().gate(gate, up, gate_bias, up_bias, joint)
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        both = [numbers_of(weight, self.dtype) for weight in (gate, up)]
        return TritonGate(PlainLinear(torch.cat(both), bias), joint)

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        made = TritonExperts.of(experts)
        return super().experts(router, experts) if made is None else ExpertLayer(router, made)


@torch.inference_mode()
def check_gate(device: torch.device, dtype: torch.dtype) -> None:
    """Compares activations of a few numbers with torch's. Raises ArithmeticError where the results differ."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn(size, generator=generator).to(device=device, dtype=dtype)
        for size in ((2 * (_COLUMNS + 8), 16), (3, 16))
    )
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for activation in Activation:
        both = PlainLinear(weight, None)
        output, expected = (kind(both, activation)(rows).float() for kind in (TritonGate, JoinedGate))
        error = float(((output - expected).abs() / (1.0 + expected.abs())).max())
        if not error < tolerance:
            raise ArithmeticError(f"its numbers are off by {error:.2g}; allowed: {tolerance}")
