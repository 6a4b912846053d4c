"""A weight whose groups are no runs of input features, as GPTQ makes with ``desc_act``: sorted by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.quantization import GROUP
from specray.errors import ConfigError

NO_FEATURE = -1
"""Number in ``ReorderedWeight.order`` of no input feature: whatever its code is, it is multiplied by zero."""


@dataclass(frozen=True, slots=True)
class ReorderedWeight:
    """A weight ``[out_features, in_features]`` with its input features in the order of their groups."""

    sorted: GroupedWeight
    order: torch.Tensor
    """int32: the input feature of each column of ``sorted``, or ``NO_FEATURE``."""
    in_features: int

    @classmethod
    def of(cls, codes: GroupedWeight, groups: torch.Tensor) -> ReorderedWeight:
        """The weight whose feature i has the group ``groups[i]``.

        Args:
            codes: with its columns as the file has them, and the scales and zeros of all groups.
            groups: int64 ``[in_features]``.
        """
        in_features = len(groups)
        order = groups.argsort(stable=True)
        return _padded(codes, order, groups[order], in_features)

    @property
    def shape(self) -> tuple[int, int]:
        return self.sorted.shape[0], self.in_features

    @property
    def unit(self) -> int:
        """Input features that belong together: none do."""
        return 1

    @property
    def num_bytes(self) -> int:
        return self.sorted.num_bytes + self.order.nbytes

    def is_like(self, other: object) -> bool:
        return (
            isinstance(other, ReorderedWeight)
            and self.sorted.is_like(other.sorted)
            and torch.equal(self.order, other.order)
        )

    def joined(self, others: Sequence[Any]) -> ReorderedWeight:
        joined = self.sorted.joined([each.sorted for each in others])
        return ReorderedWeight(joined, self.order, self.in_features)

    def select(self, index: torch.Tensor | slice) -> ReorderedWeight:
        return ReorderedWeight(self.sorted.select(index), self.order, self.in_features)

    def columns(self, start: int, stop: int) -> ReorderedWeight:
        """A run of input features; groups are filled up to whole units with features that weigh nothing."""
        if not 0 <= start < stop <= self.in_features:
            raise ConfigError(
                f"a weight is cut at input features {start} and {stop}; allowed: 0 to {self.in_features}"
            )
        places = ((self.order >= start) & (self.order < stop)).nonzero()[:, 0]
        groups = places // self.sorted.group
        found = _padded(self.sorted, places, groups, stop - start)
        order = torch.full_like(found.order, NO_FEATURE)
        is_real = found.order != NO_FEATURE
        order[is_real] = self.order[found.order[is_real].long()] - start
        return ReorderedWeight(found.sorted, order, stop - start)

    def is_finite(self) -> bool:
        return self.sorted.is_finite()

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        is_real = self.order != NO_FEATURE
        values = torch.empty(self.shape, dtype=dtype)
        values[:, self.order[is_real].long()] = self.sorted.values(dtype)[:, is_real]
        return values


def _padded(
    weight: GroupedWeight, columns: torch.Tensor, groups: torch.Tensor, in_features: int
) -> ReorderedWeight:
    """Some columns, by group, each group filled up to a multiple of 32 with codes of no feature.

    Args:
        columns: int64, sorted by group.
        groups: int64, the row of scales of each.
    """
    found, counts = torch.unique_consecutive(groups, return_counts=True)
    widths = -(-counts // GROUP) * GROUP
    size = int(widths[0]) if len(set(widths.tolist())) == 1 else GROUP
    order = torch.full((int(widths.sum()),), NO_FEATURE, dtype=torch.int64)
    ends = counts.cumsum(0)
    shifts = (widths.cumsum(0) - widths) - (ends - counts)
    order[torch.arange(len(columns)) + shifts.repeat_interleave(counts)] = columns
    of_units = found.repeat_interleave(widths // size)
    scales = weight.scales[:, of_units].contiguous()
    zeros = None if weight.zeros is None else weight.zeros[:, of_units].contiguous()
    codes = weight.codes[:, order.clamp(min=0)]
    return ReorderedWeight(GroupedWeight(codes, scales, zeros, weight.bits), order.int(), in_features)
