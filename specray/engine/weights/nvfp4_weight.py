"""A weight in NVFP4: floating-point codes of 4 bits, a scale of 8 bits for each 16 of them, and a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.weights.block_codes import MXFP4_VALUES
from specray.engine.weights.quantization import GROUP
from specray.errors import ConfigError

_NAN = 0x7F
"""Bits of a scale that is no number, without its sign."""


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """A weight ``[out_features, in_features]``: ``code * scale * factor``.

    The product of code and scale is exact in float32; that with the factor is rounded once.
    """

    codes: torch.Tensor
    """uint8 ``[out_features, in_features / 2]``: two codes of e2m1 in a byte, the first in its lower bits."""
    scales: torch.Tensor
    """float8_e4m3fn ``[out_features, in_features / 16]``."""
    factors: torch.Tensor
    """float32 ``[out_features]``."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def unit(self) -> int:
        """Input features that belong together: kernels take 32 at once."""
        return GROUP

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.factors.nbytes

    def is_like(self, other: object) -> bool:
        return isinstance(other, Nvfp4Weight) and self.shape[1] == other.shape[1]

    def joined(self, others: Sequence[Any]) -> Nvfp4Weight:
        all_of_them = (self, *others)
        return Nvfp4Weight(
            torch.cat([each.codes for each in all_of_them]),
            torch.cat([each.scales.view(torch.uint8) for each in all_of_them]).view(self.scales.dtype),
            torch.cat([each.factors for each in all_of_them]),
        )

    def select(self, index: torch.Tensor | slice) -> Nvfp4Weight:
        # Not every operator takes float8.
        scales = self.scales.view(torch.uint8)[index].view(self.scales.dtype)
        return Nvfp4Weight(self.codes[index], scales, self.factors[index])

    def columns(self, start: int, stop: int) -> Nvfp4Weight:
        """A run of input features. Raises ConfigError within a unit."""
        if start % self.unit or stop % self.unit:
            raise ConfigError(
                f"a weight in NVFP4 is cut at input features {start} and {stop}; allowed: multiples of "
                f"{self.unit} (fewer ranks, or weights in bfloat16)"
            )
        each = self.shape[1] // self.scales.shape[1]
        return Nvfp4Weight(
            self.codes[:, start // 2 : stop // 2], self.scales[:, start // each : stop // each], self.factors
        )

    def is_finite(self) -> bool:
        is_nan = (self.scales.view(torch.uint8) & _NAN) == _NAN
        return not bool(is_nan.any()) and bool(self.factors.isfinite().all())

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        both = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        numbers = (torch.tensor(MXFP4_VALUES) * 0.5)[both.int()].view(*self.scales.shape, -1)
        grouped = (numbers * self.scales.float()[..., None]).view(self.shape)
        return (grouped * self.factors[:, None]).to(dtype)
