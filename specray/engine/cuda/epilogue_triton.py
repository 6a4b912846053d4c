"""What joins the sums of gate and up in a product's kernel. Importing it needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(
    gate, up, HAS_TANH: tl.constexpr, HAS_CLAMP: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr
):
    """``activation(gate) * up`` of float32 numbers, as ``activation.Activation`` and ``Clamp`` say."""
    factor = up
    exponent = gate
    if HAS_CLAMP:
        gate = tl.minimum(gate, LIMIT)
        factor = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        exponent = gate * GAIN
    if HAS_TANH:
        # As in ``cpu.gemm.epilogue``: twice the hyperbolic tangent's argument.
        exponent = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate / (1.0 + tl.exp(-exponent)) * factor
