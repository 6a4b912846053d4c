"""The decoder's parts on CUDA whose bits of a row depend on nothing but the row. Importing it needs triton.

Every product has one tile and one order of adding up for any number of rows, every norm a program for each
row; torch's own operators choose by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Activation, Joint
from specray.engine.cuda.align import align_heads
from specray.engine.cuda.epilogue import PlainWeight
from specray.engine.cuda.linear import ProductGate, ProductLinear
from specray.engine.cuda.norm_triton import RowNorm
from specray.engine.cuda.plain_triton import multiply_plain
from specray.engine.cuda.tiles import FIXED
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.model.operators_triton import delta_mixer, expert_layer
from specray.engine.weights.stored_weight import Weight, numbers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specray.engine.model.decoder import Norm
    from specray.engine.model.layers.delta import Mixer
    from specray.engine.model.layers.experts.routing import Router
    from specray.engine.model.layers.latent.projections import HeadProduct
    from specray.engine.model.layers.mixer_lowering import PlainMixer
    from specray.engine.model.linear import Gate, Linear


class FixedOperators(TorchOperators):
    """Implements ``operators.Operators`` on CUDA, but for attention, which is chosen apart."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        plain = PlainWeight(numbers_of(weight, self.dtype).contiguous())
        return ProductLinear((plain,), bias, self.dtype, FIXED)

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        both = torch.cat([numbers_of(weight, self.dtype) for weight in (gate, up)])
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        return ProductGate(PlainWeight(both), bias, joint, self.dtype, FIXED)

    def router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return ProductLinear((PlainWeight(weight.contiguous()),), bias, weight.dtype, FIXED)

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        return expert_layer(router, experts, self.dtype, FIXED) or super().experts(router, experts)

    def mixer(self, mixer: PlainMixer) -> Mixer:
        return delta_mixer(mixer, self.dtype)

    def head_product(self, weight: torch.Tensor) -> HeadProduct:
        num_heads, in_features, size = weight.shape
        rows = weight.transpose(1, 2).reshape(num_heads * size, in_features)
        return FixedHeadProduct(PlainWeight(rows), (num_heads, in_features, size))

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return RowNorm(weight, eps)


@dataclass(frozen=True, slots=True)
class FixedHeadProduct:
    """Implements ``layers.latent.HeadProduct``."""

    weight: PlainWeight
    """The heads' ``[out_features, in_features]``, one below the other."""
    shape: tuple[int, int, int]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows, (num_heads, in_features, size) = len(rows), self.shape
        out = rows.new_empty(num_rows * num_heads, size)
        tiles = align_heads(num_rows, num_heads, FIXED.grouped_rows(num_rows), rows.device)
        multiply_plain(rows.reshape(-1, in_features), self.weight, out, tiles=tiles)
        return out.view(num_rows, -1)


@torch.inference_mode()
def check_rows(device: torch.device, dtype: torch.dtype) -> None:
    """Compares products and norms with torch's, and a row's bits alone with those in a step.

    Raises:
        ArithmeticError: a number is wrong, or a bit differs.
    """
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn(size, generator=generator).to(device, dtype) for size in ((40, 200), (64, 200))
    )
    operators = FixedOperators(dtype)
    linear, norm = operators.linear(weight, None), operators.norm(weight[0].abs(), 1e-5)
    expected = rows.double() @ weight.double().T
    error = float((linear.precise(rows) - expected).abs().max() / expected.abs().max())
    if not error < 1e-5:
        raise ArithmeticError(f"its products are off by {error:.2g}; allowed: 1e-05")
    for part in (linear, norm):
        whole = part(rows)
        for num_rows in (1, 5, 33):
            if not torch.equal(part(rows[:num_rows]), whole[:num_rows]):
                raise ArithmeticError(f"a row's bits differ in steps of {num_rows} and of 64 rows")
