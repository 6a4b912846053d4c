"""Experts beside a layer's MLP, whose sum joins the residual stream behind the next layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specray.engine.model.layers.experts.layer import ExpertLayer, Sum


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Shortcut-connected experts (Cai et al., 2024), of which some give back their input (LongCat, 2025)."""

    experts: ExpertLayer
    """Its router chooses among more: numbers from ``num_experts`` on give back their row."""
    num_experts: int
    adds_rows: bool
    """This rank adds what was given back."""
    output: Sum

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of the weighted sum of each row's experts, ``[num_rows, hidden_size]``.

        A row that is given back takes no expert of its own: one that the row has chosen anyway computes it
        with a weight of zero, so that no shape depends on the choice.
        """
        layer = self.experts
        if len(rows) == 0:
            return layer(rows)
        chosen, weights = layer.router(rows)
        is_given_back = chosen >= self.num_experts
        own = torch.where(is_given_back, chosen.amin(-1, keepdim=True) % self.num_experts, chosen)
        out = layer.experts(rows, own, weights.masked_fill(is_given_back, 0.0), layer.hits)
        if not self.adds_rows:
            return out
        factors = weights.masked_fill(~is_given_back, 0.0).sum(-1, keepdim=True)
        return (out + rows.float() * factors).to(rows.dtype)
