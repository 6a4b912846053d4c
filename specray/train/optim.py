"""Optimizer of a bfloat16 model with float32 master weights: Muon for its matrices, AdamW for the rest.

Muon's update has the scale of Liu et al. 2025 (arXiv:2502.16982), so both share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Peak learning rates and their schedule over the fraction of the run that is done."""

    matrix_learning_rate: float = 4e-3
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_fraction: float = 0.02
    final_fraction: float = 0.02  # of the peak, reached at the end
    max_grad_norm: float = 1.0

    def scale_at(self, progress: float) -> float:
        """Returns the factor of the learning rates at `progress` in [0, 1]: warm-up, then decay, linear."""
        if progress < self.warmup_fraction:
            return max(progress / self.warmup_fraction, 0.05)
        done = (min(progress, 1.0) - self.warmup_fraction) / (1 - self.warmup_fraction)
        return 1 - (1 - self.final_fraction) * done


class MasterOptimizer:
    """Steps float32 copies of a model's parameters and writes them back in the model's own type."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = dict(model.named_parameters())
        self._masters = {
            name: nn.Parameter(parameter.detach().float().clone())
            for name, parameter in self._parameters.items()
        }
        matrices = [p for name, p in self._masters.items() if p.ndim == 2 and not _is_table(name)]
        others = [p for name, p in self._masters.items() if p.ndim != 2 or _is_table(name)]
        self._muon = Muon(
            matrices,
            lr=config.matrix_learning_rate,
            weight_decay=config.weight_decay,
            momentum=0.95,
            iterated=next(iter(self._parameters.values())).dtype,
        )
        self._adamw = torch.optim.AdamW(
            others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, progress: float) -> float:
        """Applies the gradients that lie in the model, clears them, and returns their norm."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._masters[name].grad = parameter.grad.float()
                parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters.values(), self._config.max_grad_norm)
        scale = self._config.scale_at(progress)
        self._set_learning_rate(self._muon, self._config.matrix_learning_rate * scale)
        self._set_learning_rate(self._adamw, self._config.learning_rate * scale)
        optimizers: tuple[torch.optim.Optimizer, ...] = (self._muon, self._adamw)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._write_back()
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": {name: master.detach() for name, master in self._masters.items()},
            "muon": self._muon.state_dict(),
            "adamw": self._adamw.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave. Raises ConfigError where that is of other weights."""
        kept, own = (
            {name: list(weight.shape) for name, weight in each.items()}
            for each in (state["masters"], self._masters)
        )
        if differing := [name for name in {**own, **kept} if kept.get(name) != own.get(name)]:
            name = differing[0]
            raise ConfigError(
                f"the run that is there has {name!r} as {kept.get(name)}, and this one as {own.get(name)}; "
                "allowed: the options that it began with, or another directory"
            )
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])

    @staticmethod
    def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def _is_table(name: str) -> bool:
    """Whether a parameter's rows are of tokens."""
    return "embed" in name or name.startswith("lm_head.")


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in an iteration, which takes singular values towards 0.7 to 1.2."""


class Muon(torch.optim.Optimizer):
    """Momentum steps of matrices whose update has nearly equal singular values (Jordan et al. 2024).

    PyTorch's own always iterates in bfloat16, which takes longer than the rest of a step on a processor that
    does not multiply bfloat16.

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
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        odd = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        wide = torch.addmm(wide, odd, wide, beta=linear)
    return (wide.T if is_tall else wide).to(matrix.dtype)
