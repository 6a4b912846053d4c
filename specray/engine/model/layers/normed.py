"""Projections whose output is normed before it is added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Rows(Protocol):
    """``[num_rows, in_features]`` to ``[num_rows, out_features]``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class AddingNorm(Protocol):
    """A norm that adds what it has normed."""

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """``norm(rows) + summand``, whose contents may be lost."""
        ...


@dataclass(frozen=True, slots=True)
class NormedProjection:
    """Implements ``decoder.Projection``."""

    linear: Rows
    norm: AddingNorm

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self.norm.plus(self.linear(rows), summand)
