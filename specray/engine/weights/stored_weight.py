"""A weight as a file stores it: parts of rows, each in its own format, cut and joined undecoded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.reordered_weight import ReorderedWeight

Part: TypeAlias = BlockWeight | GroupedWeight | Nvfp4Weight | ReorderedWeight


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight ``[out_features, in_features]`` on the CPU; neighbouring parts are of different formats."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> StoredWeight:
        """The weight of these parts' rows, one below the other."""
        alike: list[list[Part]] = []
        for part in parts:
            if alike and alike[-1][0].is_like(part):
                alike[-1].append(part)
            else:
                alike.append([part])
        return cls(tuple(run[0].joined(run[1:]) if len(run) > 1 else run[0] for run in alike))

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def unit(self) -> int:
        """Input features that belong together: :meth:`columns` cuts at multiples of it."""
        return math.lcm(*(part.unit for part in self.parts))

    def select(self, index: torch.Tensor | slice) -> StoredWeight:
        """Some rows, in this order; a slice has no step, an index is int64 and not negative."""
        if isinstance(index, slice):
            first, last, _ = index.indices(self.shape[0])
            index = torch.arange(first, last) if len(self.parts) > 1 else slice(first, last)
        if len(self.parts) == 1:
            return StoredWeight((self.parts[0].select(index),))
        assert isinstance(index, torch.Tensor), "made above"
        ends = torch.tensor(list(accumulate(part.shape[0] for part in self.parts)))
        places = torch.bucketize(index, ends, right=True)
        found, counts = torch.unique_consecutive(places, return_counts=True)
        runs = torch.split(index, counts.tolist())
        return StoredWeight.of(
            self.parts[place].select(run - (int(ends[place]) - self.parts[place].shape[0]))
            for place, run in zip(found.tolist(), runs, strict=True)
        )

    def columns(self, start: int, stop: int) -> StoredWeight:
        """A run of input features. Raises ConfigError where it cuts a block or a group."""
        return StoredWeight(tuple(part.columns(start, stop) for part in self.parts))

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return all(part.is_finite() for part in self.parts)

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight's numbers, computed in float32."""
        values = torch.empty(self.shape, dtype=dtype)
        first = 0
        for part in self.parts:
            values[first : first + part.shape[0]] = part.values(dtype)
            first += part.shape[0]
        return values


Weight: TypeAlias = torch.Tensor | StoredWeight
"""A weight ``[out_features, in_features]``: numbers, or what a file stores."""


def numbers_of(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight's numbers: those of a file in ``dtype``, a tensor as it is."""
    return weight.values(dtype) if isinstance(weight, StoredWeight) else weight


def alike(weights: Sequence[Weight]) -> list[Weight]:
    """Weights of one layer as they are stored; if some are tensors, all as tensors of their type."""
    plain = next((weight for weight in weights if isinstance(weight, torch.Tensor)), None)
    if plain is None:
        return list(weights)
    return [numbers_of(weight, plain.dtype).to(plain.device) for weight in weights]


def join(weights: Sequence[Weight]) -> Weight:
    """One weight of the rows of several, which have the same input features."""
    stored = [weight for weight in weights if isinstance(weight, StoredWeight)]
    if len(stored) == len(weights):
        return StoredWeight.of(part for weight in stored for part in weight.parts)
    return torch.cat([weight for weight in alike(weights) if isinstance(weight, torch.Tensor)])
