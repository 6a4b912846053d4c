"""Experts whose weights stay in the bits that a file stores. Importing it needs triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specray.engine.activation import Joint
from specray.engine.cuda.align_triton import align_pairs, count_hits
from specray.engine.cuda.codes.packed import PackedWeight, stack
from specray.engine.cuda.codes.product_triton import multiply
from specray.engine.cuda.epilogue import Epilogue
from specray.engine.cuda.grouped_triton import add_up
from specray.engine.cuda.linear import Multiplied, ProductGate, ProductLinear
from specray.engine.cuda.tiles import GROUPED


@dataclass(frozen=True, slots=True)
class CodeExperts:
    """Implements ``layers.experts.ExpertMlps``: kernels whose shapes do not depend on the routing.

    Every step has the same tiles, so a row's bits are the same in any.
    """

    gate: PackedWeight
    """Weights of all experts, the gate's output features before those of up."""
    down: PackedWeight
    gate_bias: torch.Tensor | None
    """``[num_experts, 2 * size]``."""
    down_bias: torch.Tensor | None
    joint: Joint

    @classmethod
    def of(cls, gates: Sequence[object], downs: Sequence[object]) -> CodeExperts | None:
        """The experts of these layers; None: some hold plain numbers, or several or different layouts."""
        both = [each for each in gates if isinstance(each, ProductGate)]
        ends = [each for each in downs if isinstance(each, ProductLinear) and len(each.parts) == 1]
        firsts, seconds = _stacked([each.both for each in both]), _stacked([each.parts[0] for each in ends])
        if firsts is None or seconds is None or not len(both) == len(ends) == len(gates):
            return None
        return cls(firsts, seconds, _biases(both), _biases(ends), both[0].joint)

    @property
    def can_be_captured(self) -> bool:
        return True

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        hits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if hits is not None:
            count_hits(chosen, self.gate.num_experts, hits)
        if len(rows) == 0:
            return torch.empty_like(rows)
        tiles, num_pairs = align_pairs(chosen, self.gate.num_experts, GROUPED.rows), chosen.numel()
        gated = rows.new_empty(num_pairs, self.gate.size // 2)
        multiply(rows, self.gate, gated, Epilogue(self.gate_bias, joint=self.joint), tiles=tiles)
        out = rows.new_empty(num_pairs, self.down.size)
        return add_up(multiply(gated, self.down, out, Epilogue(self.down_bias), tiles=tiles), weights)


def _stacked(weights: Sequence[Multiplied]) -> PackedWeight | None:
    packed = [each for each in weights if isinstance(each, PackedWeight)]
    return stack(packed) if packed and len(packed) == len(weights) else None


def _biases(layers: Sequence[ProductGate | ProductLinear]) -> torch.Tensor | None:
    biases = [each.bias for each in layers if each.bias is not None]
    return torch.stack(biases) if biases else None
