"""Projections whose output is normed: before it is added to the residual stream, or before attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext


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


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for a part that a layer has not: rows go through it, and it adds nothing to others."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return summand


@dataclass(frozen=True, slots=True)
class NormedQueries:
    """A qkv projection whose queries, and whose keys, are normed, all heads of a row as one (as in OLMoE).

    RMS norm (Zhang and Sennrich, 2019) over the heads of all ranks.
    """

    linear: Rows
    weights: tuple[torch.Tensor, torch.Tensor]
    """Weights of this rank's queries, ``[num_heads * head_dim]``, and of its keys."""
    eps: float
    parallel: ParallelContext | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to queries, keys and values, side by side."""
        qkv = self.linear(rows)
        num_queries, num_keys = (len(weight) for weight in self.weights)
        parts = qkv[:, :num_queries], qkv[:, num_queries : num_queries + num_keys]
        means = torch.stack([part.float().square().mean(-1) for part in parts])
        if self.parallel is not None:
            # The ranks' parts are equal, or copies of the same keys.
            means = self.parallel.all_reduce(means) / self.parallel.world_size
        for part, weight, mean in zip(parts, self.weights, means, strict=True):
            part.copy_(part.float() * torch.rsqrt(mean + self.eps)[:, None] * weight)
        return qkv
