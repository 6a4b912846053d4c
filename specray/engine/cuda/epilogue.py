"""What follows the sums of a product before they are rounded, and weights whose values are plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specray.engine.activation import Joint


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows a product's sums, in float32."""

    bias: torch.Tensor | None = None
    """``[size]``, of experts ``[num_experts, size]``."""
    summand: torch.Tensor | None = None
    """``[num_rows, size]``, of any type."""
    joint: Joint | None = None
    """Activation of a gated pair, whose weight has the gate's outputs before those of up; None: no gate."""


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
        """Some output features."""
        return PlainWeight(self.numbers[rows])
