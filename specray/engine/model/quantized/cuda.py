"""The decoder's parts on CUDA with weights in codes, as Triton kernels. Importing it needs triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Activation, Joint
from specray.engine.cuda.codes.check import check_product
from specray.engine.cuda.codes.layout import CodeLayout
from specray.engine.cuda.codes.look_up_triton import CodeEmbedding
from specray.engine.cuda.codes.packed import Packable, PackedWeight, can_pack, pack
from specray.engine.cuda.linear import ProductGate, ProductLinear
from specray.engine.cuda.tiles import FREE, TileRule
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp
from specray.engine.model.layers.vocabulary import TableEmbedding
from specray.engine.model.linear import JoinedGate
from specray.engine.model.operators_triton import expert_layer
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize
from specray.engine.weights.stored_weight import StoredWeight, Weight, join, numbers_of

if TYPE_CHECKING:
    from specray.engine.model.decoder import Embedding
    from specray.engine.model.layers.experts.routing import Router
    from specray.engine.model.linear import Gate, Linear
    from specray.engine.model.operators import Operators


class CodeOperators:
    """Implements ``operators.Operators``: what a file stores stays in its own bits, or all is quantised.

    Args:
        others: make everything else.
        dtype, device: of the model.
        format: to which each weight is quantised as it comes; NONE: what a file stores stays as it is, where
            it has a layout, and plain weights are plain.

    Raises:
        ConfigError: a kernel does not compute what the weight's values give, or a weight is not finite.
    """

    def __init__(
        self,
        others: Operators,
        dtype: torch.dtype,
        device: torch.device,
        format: Quantization = Quantization.NONE,
        rule: TileRule = FREE,
    ) -> None:
        self._others, self._dtype, self._device = others, dtype, device
        self.router, self.row_gate, self.squared = others.router, others.row_gate, others.squared
        self.mixer, self.head_product, self.inputs = others.mixer, others.head_product, others.inputs
        self.norm, self.attention = others.norm, others.attention
        self._format, self._rule = format, rule
        self._checked: set[CodeLayout] = set()
        is_plain = format is Quantization.NONE
        self._setting = "weights is 'auto'" if is_plain else f"quantization is {format.value!r}"
        self._allowed = "'dtype'" if is_plain else "'none'"

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        parts = self._parts(weight)
        if parts is None:
            return self._others.linear(self._numbers(weight), bias)
        return ProductLinear(self._packed(parts), bias, self._dtype, self._rule)

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        is_plain = isinstance(gate, torch.Tensor) and self._format is Quantization.NONE
        parts = None if is_plain else self._parts(join((gate, up)))
        if parts is None:
            both = self._numbers(gate), self._numbers(up)
            return self._others.gate(*both, gate_bias, up_bias, joint)
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        packed = self._packed(parts)
        if len(packed) == 1:
            return ProductGate(packed[0], bias, joint, self._dtype, self._rule)
        return JoinedGate(ProductLinear(packed, bias, self._dtype, self._rule), joint)

    def embedding(self, table: Weight, head: Linear | None) -> Embedding:
        """Look-ups in a table of this format, which a head of the same weight shares."""
        if isinstance(head, ProductLinear) and len(head.parts) == 1:
            [shared] = head.parts
            if isinstance(shared, PackedWeight):
                return CodeEmbedding(shared, self._dtype)
        parts = self._parts(table)
        if parts is None or len(parts) > 1:
            return TableEmbedding(self._numbers(table))
        return CodeEmbedding(self._packed(parts)[0], self._dtype)

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        made = expert_layer(router, experts, self._dtype, self._rule)
        return made or self._others.experts(router, experts)

    def _parts(self, weight: Weight) -> Sequence[Packable] | None:
        """What is packed of a weight; None: it is multiplied as numbers."""
        if self._format is not Quantization.NONE:
            return (quantize(self._numbers(weight), self._format),)
        return weight.parts if isinstance(weight, StoredWeight) and can_pack(weight) else None

    def _numbers(self, weight: Weight) -> torch.Tensor:
        return numbers_of(weight, self._dtype).to(self._device)

    def _packed(self, parts: Sequence[Packable]) -> tuple[PackedWeight, ...]:
        made = []
        for part in parts:
            packed = pack(part, self._device)
            if packed.layout not in self._checked:
                check_product(packed, part, self._dtype, self._setting, self._allowed)
                self._checked.add(packed.layout)
            made.append(packed)
        return tuple(made)
