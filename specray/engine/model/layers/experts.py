"""Several MLPs in the place of one: a router chooses some for each row.

Rows are sorted by expert, so that each expert multiplies all of its rows at once. Which experts are hit is
known on the host: such a forward cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from specray.engine.model.decoder_config import Clamp
    from specray.engine.model.linear import Gate, Linear
    from specray.engine.runner.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts by the largest probabilities."""

    weight: torch.Tensor  # [num_experts, hidden_size]
    num_chosen: int
    is_normed: bool
    """Probabilities of the chosen ones are made to add up to one."""
    bias: torch.Tensor | None = None  # [num_experts]

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and numbers of the chosen experts, ``[num_rows, num_chosen]`` each."""
        probabilities = F.linear(rows, self.weight, self.bias).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.num_chosen, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.is_normed else weights), chosen


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """``clamp(gate) * sigmoid(gain * clamp(gate)) * (clamp(up) + 1)`` of two linear layers, as in gpt-oss."""

    both: Linear
    """The gate's outputs before those of up."""
    clamp: Clamp

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(rows).chunk(2, -1)
        gate, up = gate.clamp(max=self.clamp.limit), up.clamp(-self.clamp.limit, self.clamp.limit)
        return gate * torch.sigmoid(gate * self.clamp.gain) * (up + 1.0)


@dataclass(frozen=True, slots=True)
class Expert:
    """A gated MLP."""

    gate: Gate | ClampedGate
    down: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(rows))


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The MLPs of a layer on this rank, in the place of ``decoder.Layer.gate``."""

    router: Router
    experts: Sequence[Expert]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's experts, ``[num_rows, hidden_size]``."""
        weights, chosen = self.router(rows)
        num_rows, num_chosen = chosen.shape
        order = chosen.view(-1).argsort(stable=True)
        # Of row i's j-th expert, at i * num_chosen + j.
        sources = order // num_chosen
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        sorted_rows = rows[sources]
        outputs = torch.empty_like(sorted_rows)
        first = 0
        for expert, count in enumerate(counts):
            if count:
                run = slice(first, first + count)
                outputs[run] = self.experts[expert](sorted_rows[run])
                first += count
        ordered = torch.empty_like(outputs)
        ordered[order] = outputs
        # One row's sum has one order, whatever rows are beside it.
        weighted = ordered.view(num_rows, num_chosen, rows.shape[1]).float() * weights[..., None]
        return weighted.sum(1).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class Sum:
    """Implements ``decoder.Projection`` for rows that are of the residual stream's size already."""

    parallel: ParallelContext | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.parallel is None else self.parallel.all_reduce(rows)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return summand.add_(self(rows))
