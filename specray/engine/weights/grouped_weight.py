"""A weight in its own bits: whole numbers or short floats, and one scale for each group of input features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.weights.quantization import GROUP
from specray.errors import ConfigError

NIBBLE_BITS, BYTE_BITS, HALF_BITS = 4, 8, 16


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight ``[out_features, in_features]``: ``(code - zero) * scale``, rounded once to float32."""

    codes: torch.Tensor  # int8, float8_e4m3fn or float16 [out_features, in_features]
    scales: torch.Tensor  # float16, bfloat16 or float32 [out_features, in_features / group]
    zeros: torch.Tensor | None = None  # int8, as the scales; None: 0
    bits: int = BYTE_BITS
    """Bits of a code: with 4, codes are 0..15 and zeros 0..16."""

    @property
    def shape(self) -> tuple[int, int]:
        out_features, in_features = self.codes.shape
        return out_features, in_features

    @property
    def group(self) -> int:
        """Input features that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def unit(self) -> int:
        """Input features that belong together: a group divides where its parts have the scale each."""
        return math.gcd(self.group, GROUP)

    @property
    def num_bytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.numel() * self.bits // 8 + self.scales.nbytes + zeros

    def is_like(self, other: object) -> bool:
        return (
            isinstance(other, GroupedWeight)
            and self.shape[1] == other.shape[1]
            and (self.codes.dtype, self.bits, self.group, self.scales.dtype, self.zeros is None)
            == (other.codes.dtype, other.bits, other.group, other.scales.dtype, other.zeros is None)
        )

    def joined(self, others: Sequence[Any]) -> GroupedWeight:
        codes, scales = (
            torch.cat([getattr(each, name) for each in (self, *others)]) for name in ("codes", "scales")
        )
        zeros = None if self.zeros is None else torch.cat([self.zeros, *(each.zeros for each in others)])
        return GroupedWeight(codes, scales, zeros, self.bits)

    def select(self, index: torch.Tensor | slice) -> GroupedWeight:
        zeros = None if self.zeros is None else self.zeros[index]
        return GroupedWeight(self.codes[index], self.scales[index], zeros, self.bits)

    def columns(self, start: int, stop: int) -> GroupedWeight:
        """A run of input features, in smaller groups if it cuts one. Raises ConfigError within a unit."""
        if start % self.unit or stop % self.unit:
            raise ConfigError(
                f"a weight with groups of {self.group} is cut at input features {start} and {stop}; allowed: "
                f"multiples of {self.unit} (fewer ranks, or weights in bfloat16)"
            )
        size = math.gcd(self.group, start, stop)
        groups, each = slice(start // size, stop // size), self.group // size
        numbers = [
            None if values is None else values.repeat_interleave(each, 1)[:, groups]
            for values in (self.scales, self.zeros)
        ]
        assert numbers[0] is not None, "scales are always there"
        return GroupedWeight(self.codes[:, start:stop], numbers[0], numbers[1], self.bits)

    def reordered(self, columns: torch.Tensor) -> GroupedWeight:
        """The weight with its input features in another order, which takes groups as a whole; int64."""
        groups = columns[:: self.group] // self.group
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return GroupedWeight(self.codes[:, columns], self.scales[:, groups], zeros, self.bits)

    def is_finite(self) -> bool:
        codes = self.codes
        if codes.dtype == torch.float8_e4m3fn and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            return False
        has_half = codes.dtype == torch.float16
        return bool(self.scales.isfinite().all()) and not (has_half and not bool(codes.isfinite().all()))

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes = self.codes.float().view(*self.scales.shape, -1)
        if self.zeros is not None:
            codes -= self.zeros[..., None].float()
        return codes.mul_(self.scales.float()[..., None]).view(self.codes.shape).to(dtype)
