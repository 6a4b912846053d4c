"""Which experts compute each row, and how much each of their outputs weighs.

Everything is done by operators of the device whose shapes the numbers of rows and experts alone decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts by the largest probabilities."""

    linear: Callable[[torch.Tensor], torch.Tensor]
    """``[num_rows, hidden_size]`` to ``[num_rows, num_experts]``."""
    num_chosen: int
    is_normed: bool
    """Probabilities of the chosen ones are made to add up to one."""

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers, int64, and weights, float32, of the chosen experts, ``[num_rows, num_chosen]`` each."""
        probabilities = self.linear(rows).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.num_chosen, -1)
        return chosen, (weights / weights.sum(-1, keepdim=True) if self.is_normed else weights)
