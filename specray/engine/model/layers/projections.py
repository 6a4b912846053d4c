"""Linear layers of this rank, and sums over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.weights.stored_weight import Weight

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.linear import Linear
    from specray.engine.model.operators import Operators


@dataclass(frozen=True, slots=True)
class ReducedLinear:
    """Some input features of a linear layer: the ranks' results are summed."""

    local: Linear
    bias: torch.Tensor | None
    parallel: ParallelContext

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        total = self.parallel.all_reduce(self.local(rows))
        return total if self.bias is None else total.add_(self.bias)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(summand)


def lower_linear(weight: Weight, bias: torch.Tensor | None, operators: Operators) -> Linear:
    """Kernels of stored weights take a bias as the file has it; others take it in the weight's type."""
    if bias is not None and isinstance(weight, torch.Tensor):
        bias = bias.to(weight.dtype)
    return operators.linear(weight, bias)


def lower_projection(
    name: str,
    in_features: int,
    has_bias: bool,
    taken: RankWeights,
    operators: Operators,
    *,
    scale: float = 1.0,
) -> Linear | ReducedLinear:
    """Builds a projection back to the residual stream, whose output has a factor in the model."""
    part = taken.part(in_features, dim=1)
    weight = taken.weight(f"{name}.weight", part)
    bias = taken.whole(f"{name}.bias") if has_bias else None
    if scale != 1.0:
        weight = scaled(taken.weights.take(f"{name}.weight", part), scale)
        bias = None if bias is None else scaled(bias, scale)
    if taken.parallel is None:
        return lower_linear(weight, bias, operators)
    return ReducedLinear(operators.linear(weight, None), bias, taken.parallel)


def scaled(numbers: torch.Tensor, factor: float) -> torch.Tensor:
    """Numbers times a factor that a model has behind a layer, rounded to their type."""
    return numbers if factor == 1.0 else (numbers.float() * factor).to(numbers.dtype)
