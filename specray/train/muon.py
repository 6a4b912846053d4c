"""Muon: momentum steps of matrices whose update has nearly equal singular values.

Jordan et al. 2024. PyTorch has it, too, and iterates in bfloat16 always: on a processor that does not
multiply bfloat16, that takes longer than all the rest of a step. Here the iteration's data type is given.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in an iteration, which takes singular values towards 0.7 to 1.2."""
_NUM_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, with a scale of about AdamW's.

    Args:
        parameters: matrices.
        lr: learning rate, as for AdamW (Liu et al. 2025, arXiv:2502.16982).
        iterated: data type of the iteration's products.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        iterated: torch.dtype,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._iterated = iterated

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Applies the gradients; matrices without one stay."""
        for group in self.param_groups:
            learning_rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(mean, momentum), self._iterated)
                matrix.mul_(1 - learning_rate * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * learning_rate * max(matrix.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor, iterated: torch.dtype) -> torch.Tensor:
    """The matrix with singular values near 1, by Newton and Schulz's iteration."""
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if is_tall else matrix).to(iterated)
    # No singular value is above the norm.
    wide = wide / wide.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = wide @ wide.T
        odd = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        wide = torch.addmm(wide, odd, wide, beta=linear)
    return (wide.T if is_tall else wide).to(matrix.dtype)
