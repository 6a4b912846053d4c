"""An MLP that computes every row, beside the experts that compute some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp


@dataclass(frozen=True, slots=True)
class WithSharedMlp:
    """Experts and a shared MLP on this rank, in the place of ``decoder.DecoderLayer.gate``."""

    experts: ExpertLayer
    shared: ExpertMlp
    gate: Callable[[torch.Tensor], torch.Tensor] | None
    """``[num_rows, hidden_size]`` to ``[num_rows, 1]``, whose sigmoid is a factor of the shared MLP's output.

    None: there is no factor.
    """

    @property
    def can_be_captured(self) -> bool:
        """Whether a call runs the same operators whatever the choice."""
        return self.experts.can_be_captured

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of both, ``[num_rows, hidden_size]``."""
        shared = self.shared(rows)
        if self.gate is not None:
            shared = shared * self.gate(rows).sigmoid()
        return self.experts(rows).add_(shared)
