"""Which experts compute each row, and how much each of their outputs weighs.

Everything is done by operators of the device whose shapes the numbers of rows and experts alone decide. Of
equal numbers the one of the lower expert counts as larger, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specray.engine.model.layers.experts.config import Groups, Routing, Score


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts for each row, as its family does."""

    linear: Callable[[torch.Tensor], torch.Tensor]
    """``[num_rows, hidden_size]`` to ``[num_rows, num_experts]``; both float32 where the routing is wide."""
    routing: Routing
    choice_bias: torch.Tensor | None = None
    """Added for the choice, ``[num_experts]``, float32; it does not weigh."""

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers, int64, and weights, float32, of the chosen experts, ``[num_rows, num_chosen]`` each."""
        routing = self.routing
        products = self.linear(rows.float() if routing.is_wide else rows).float()
        scores = products if routing.chooses_by_product else _scored(products, routing.score)
        choices = scores if self.choice_bias is None else scores + self.choice_bias
        if routing.groups is not None:
            choices = _within_groups(choices, routing.groups)
        chosen = _largest(choices, routing.num_chosen)
        weights = scores.gather(-1, chosen)
        if routing.chooses_by_product:
            weights = _scored(weights, routing.score)
        if routing.is_normed:
            total = weights.sum(-1, keepdim=True) + routing.epsilon
            weights = weights / (total.clamp(min=routing.floor) if routing.floor else total)
        if routing.scale != 1.0:
            weights = weights * routing.scale
        return chosen, (weights.to(rows.dtype).float() if routing.is_rounded else weights)


def _scored(products: torch.Tensor, score: Score) -> torch.Tensor:
    return products.softmax(-1) if score is Score.SOFTMAX else products.sigmoid()


def _largest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest numbers of each row, the largest first."""
    return torch.sort(numbers, dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def _within_groups(choices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The numbers of the experts in the best groups; of the others minus infinity."""
    grouped = choices.view(len(choices), groups.number, choices.shape[-1] // groups.number)
    totals = torch.sort(grouped, dim=-1, descending=True).values[..., : groups.num_summed].sum(-1)
    kept = torch.zeros_like(totals, dtype=torch.bool)
    kept.scatter_(-1, _largest(totals, groups.num_kept), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).view_as(choices)
