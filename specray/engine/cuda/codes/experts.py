"""Experts whose weights stay in the bits that a file stores. Importing it needs triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specray.engine.activation import Joint
from specray.engine.cuda.align_triton import align_pairs
from specray.engine.cuda.codes.packed import PackedWeight
from specray.engine.cuda.codes.product_triton import multiply
from specray.engine.cuda.epilogue import Epilogue
from specray.engine.cuda.grouped_triton import add_up

TILE_ROWS = 16
"""Rows of a tile in every step, so that a row's bits are the same in any."""


@dataclass(frozen=True, slots=True)
class CodeExperts:
    """Implements ``layers.experts.RoutedExperts``: kernels whose shapes do not depend on the routing."""

    gate: PackedWeight
    """Of all experts, gate's output features before those of up."""
    down: PackedWeight
    gate_bias: torch.Tensor | None
    """``[num_experts, 2 * size]``."""
    down_bias: torch.Tensor | None
    joint: Joint

    @property
    def can_be_captured(self) -> bool:
        return True

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(rows) == 0:
            return torch.empty_like(rows)
        tiles, num_pairs = align_pairs(chosen, self.gate.num_experts, TILE_ROWS), chosen.numel()
        gated = rows.new_empty(num_pairs, self.gate.size // 2)
        multiply(rows, self.gate, gated, Epilogue(self.gate_bias, joint=self.joint), tiles=tiles)
        out = rows.new_empty(num_pairs, self.down.size)
        return add_up(multiply(gated, self.down, out, Epilogue(self.down_bias), tiles=tiles), weights)
