"""The decoder's parts from torch's operators: linear layers, norms and attention."""

from __future__ import annotations

import torch

from specray.engine.model.decoder import Attention, Norm, PlainAttention, RMSNorm, Rotary
from specray.engine.model.linear import Gate, Linear, make_gate, make_linear
from specray.engine.step import HeadShape


class TorchOperators:
    """Torch's own.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return make_linear(weight, bias)

    def gate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> Gate:
        return make_gate(gate, up, gate_bias, up_bias)

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return RMSNorm(weight, eps)

    def attention(self, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape) -> Attention:
        tables = rotary_tables(cos, sin, self.dtype)
        return PlainAttention(tables, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scale)


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """The tables in the form that torch's operators rotate with; rounded as the library rounds them."""
    first_half, second_half = sin.chunk(2, -1)
    signed_sin = torch.cat((-first_half, second_half), -1)
    return Rotary(cos.unsqueeze(1).to(dtype).contiguous(), signed_sin.unsqueeze(1).to(dtype))
