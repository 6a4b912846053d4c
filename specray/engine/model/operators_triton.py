"""The work between a layer's matrix products, in few Triton kernels. Importing it needs triton.

A captured forward of few rows still pays some microseconds for every operator: norming and rotating queries
and keys and writing the cache is one here, and so is the activation of a gated pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from specray.engine.activation import Activation
from specray.engine.model.decoder import HeadNorm
from specray.engine.model.linear import PlainGate
from specray.engine.model.operators_torch import TorchOperators

_COLUMNS = 1024


@triton.jit
def _store(
    heads,
    layer,
    query,
    slots,
    cos,
    sin,
    norm_weight,
    eps,
    row_stride,
    slot_stride,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    source = heads + row * row_stride + head * HEAD_DIM
    numbers = tl.load(source + dim, mask=is_dim, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        half: tl.constexpr = HEAD_DIM // 2
        partner = tl.where(dim < half, dim + half, dim - half)
        others = tl.load(source + partner, mask=is_dim, other=0.0)
        if HAS_NORM:
            # Rounded where the operators of a head norm round.
            wide = numbers.to(tl.float32)
            factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / HEAD_DIM + eps)
            own_weight = tl.load(norm_weight + head * HEAD_DIM + dim, mask=is_dim, other=0.0)
            other_weight = tl.load(norm_weight + head * HEAD_DIM + partner, mask=is_dim, other=0.0)
            numbers = (wide * factor).to(norm_weight.dtype.element_ty) * own_weight
            others = (others.to(tl.float32) * factor).to(norm_weight.dtype.element_ty) * other_weight
        cosine = tl.load(cos + row * HEAD_DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * HEAD_DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
        rotated = numbers.to(tl.float32) * cosine + others.to(tl.float32) * sine
        numbers = rotated.to(heads.dtype.element_ty)
    if head < NUM_HEADS:
        tl.store(query + (row * NUM_HEADS + head) * HEAD_DIM + dim, numbers, mask=is_dim)
    else:
        slot = tl.load(slots + row)
        tl.store(layer + slot * slot_stride + (head - NUM_HEADS) * HEAD_DIM + dim, numbers, mask=is_dim)


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


def store_rows(
    heads: torch.Tensor,
    layer: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Implements ``paged.StoreRows``."""
    num_rows, num_all_heads, head_dim = heads.shape
    num_kv_heads = layer.shape[1] // 2
    num_heads = num_all_heads - 2 * num_kv_heads
    query = torch.empty(num_rows, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    _store[(num_rows, num_all_heads)](
        heads,
        layer,
        query,
        slots,
        cos,
        sin,
        cos if head_norm is None else head_norm.weight,
        0.0 if head_norm is None else head_norm.eps,
        heads.stride(0),
        layer.stride(0),
        HAS_NORM=head_norm is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return query


@dataclass(frozen=True, slots=True)
class TritonGate(PlainGate):
    """A gated pair whose activation is one kernel."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        both = F.linear(rows, self.weight, self.bias)
        num_rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty(num_rows, size, dtype=both.dtype, device=both.device)
        _activate[(num_rows, triton.cdiv(size, _COLUMNS))](
            both, out, size, HAS_TANH=self.activation is Activation.GELU_TANH, COLUMNS=_COLUMNS
        )
        return out


class TritonOperators(TorchOperators):
    """Implements ``operators.Operators`` on CUDA."""

    def gate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: Activation = Activation.SILU,
    ) -> TritonGate:
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        return TritonGate(torch.cat((gate, up)), bias, activation)


@torch.inference_mode()
def check_gate(device: torch.device, dtype: torch.dtype) -> None:
    """Activates a few numbers beside torch. Raises ArithmeticError where the results differ."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn(size, generator=generator).to(device=device, dtype=dtype)
        for size in ((2 * (_COLUMNS + 8), 16), (3, 16))
    )
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for activation in Activation:
        output, expected = (kind(weight, None, activation)(rows).float() for kind in (TritonGate, PlainGate))
        error = float(((output - expected).abs() / (1.0 + expected.abs())).max())
        if not error < tolerance:
            raise ArithmeticError(f"its numbers are off by {error:.2g}; allowed: {tolerance}")
