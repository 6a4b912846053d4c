"""What follows the sums of a product before they are rounded, and weights whose values are plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.activation import Activation, Clamp, Joint


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows a product's sums, in float32."""

    bias: torch.Tensor | None = None
    """``[size]``, of experts ``[num_experts, size]``."""
    summand: torch.Tensor | None = None
    """``[num_rows, size]``, of any type."""
    joint: Joint | None = None
    """Activation of a gated pair, whose weight has the gate's outputs before those of up; None: no gate."""

    def constants(self) -> dict[str, Any]:
        """Arguments that a product's kernel is compiled for."""
        return {
            "IS_GATED": self.joint is not None,
            "HAS_BIAS": self.bias is not None,
            "HAS_SUMMAND": self.summand is not None,
            **joint_constants(self.joint),
        }


def joint_constants(joint: Joint | None) -> dict[str, Any]:
    """Arguments of ``epilogue_triton.joined``."""
    clamp = joint if isinstance(joint, Clamp) else None
    return {
        "HAS_TANH": joint is Activation.GELU_TANH,
        "HAS_CLAMP": clamp is not None,
        "GAIN": 0.0 if clamp is None else clamp.gain,
        "LIMIT": 0.0 if clamp is None else clamp.limit,
    }


NO_EPILOGUE = Epilogue()
"""Products as they are."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight of numbers."""

    numbers: torch.Tensor  # [size, in_features], or one of each expert; numbers of a row side by side

    @property
    def size(self) -> int:
        return self.numbers.shape[-2]

    @property
    def in_features(self) -> int:
        return self.numbers.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def num_weights(self) -> int:
        return self.numbers.numel()

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes

    def is_like(self, other: object) -> bool:
        """Whether both can be one weight of experts."""
        return isinstance(other, PlainWeight) and (self.numbers.shape, self.numbers.dtype) == (
            other.numbers.shape,
            other.numbers.dtype,
        )

    def select(self, rows: slice) -> PlainWeight:
        return PlainWeight(self.numbers[rows])
