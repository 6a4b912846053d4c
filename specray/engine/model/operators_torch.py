"""The decoder's parts from torch's operators: linear layers, norms and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specray.engine.activation import Activation, Joint
from specray.engine.attention.base import Attention, LayeredAttention, Rotary
from specray.engine.attention.sdpa import PlainAttention
from specray.engine.model.decoder import Norm, RMSNorm, RowGate, SigmoidGate, WideRMSNorm
from specray.engine.model.layers.delta import DeltaInputs, Mixer
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp, ExpertsInTurn
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.latent.projections import HeadProduct, LatentQueries, TorchHeadProduct
from specray.engine.model.layers.mixer_lowering import PlainMixer
from specray.engine.model.layers.normed import Rows
from specray.engine.model.linear import Gate, Linear, SquaredLinear, make_gate, make_linear
from specray.engine.model.rotary import RotaryTables
from specray.engine.step import HeadShape
from specray.engine.weights.stored_weight import Weight, numbers_of


class TorchOperators:
    """Torch's own.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        numbers = numbers_of(weight, self.dtype)
        return make_linear(numbers, None if bias is None else bias.to(numbers.dtype))

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        both = numbers_of(gate, self.dtype), numbers_of(up, self.dtype)
        dtype = both[0].dtype
        if gate_bias is not None and up_bias is not None:
            gate_bias, up_bias = gate_bias.to(dtype), up_bias.to(dtype)
        return make_gate(*both, gate_bias, up_bias, joint)

    def router(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return make_linear(weight, bias)

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        return ExpertLayer(router, ExpertsInTurn(experts))

    def row_gate(self, linear: Linear, size: int, width: int = 1) -> RowGate:
        return SigmoidGate(linear)

    def mixer(self, mixer: PlainMixer) -> Mixer:
        return mixer

    def squared(self, linear: Linear) -> Gate:
        return SquaredLinear(linear)

    def head_product(self, weight: torch.Tensor) -> HeadProduct:
        return TorchHeadProduct(weight)

    def inputs(self, made: LatentQueries | DeltaInputs) -> Rows:
        return made

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return RMSNorm(weight, eps) if weight.dtype == self.dtype else WideRMSNorm(weight, eps)

    def attention(self, tables: RotaryTables, shape: HeadShape) -> Attention:
        return by_layer(tables, self.dtype, lambda rotary: PlainAttention(rotary, shape))


def by_layer(tables: RotaryTables, dtype: torch.dtype, make: Callable[[Rotary], Attention]) -> Attention:
    kinds = tuple(make(rotary_tables(cos, sin, dtype)) for cos, sin in tables.kinds)
    return kinds[0] if len(kinds) == 1 else LayeredAttention(kinds, tables.of_layers)


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """The tables in the form that torch's operators rotate with; rounded as the library rounds them."""
    first_half, second_half = sin.chunk(2, -1)
    signed_sin = torch.cat((-first_half, second_half), -1)
    return Rotary(cos.unsqueeze(1).to(dtype).contiguous(), signed_sin.unsqueeze(1).to(dtype))
