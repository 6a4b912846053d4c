"""A weight in the file's own bits: rows of blocks as they lie in the file, cut and joined undecoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specray.engine.weights.block_codes import BlockCodes, decode
from specray.engine.weights.block_type import BlockType
from specray.errors import ConfigError

_VALUES_AT_ONCE = 1 << 22
"""Values that are decoded at once, so that what lies between takes some MiB, whatever the weight's size."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight ``[out_features, in_features]`` of one type of blocks."""

    kind: BlockType
    rows: torch.Tensor  # uint8 [out_features, row_bytes], maybe a read-only view of the file

    @property
    def shape(self) -> tuple[int, int]:
        size = self.kind.size
        return len(self.rows), self.rows.shape[1] // size.num_bytes * size.num_values

    @property
    def num_bytes(self) -> int:
        return self.rows.shape[0] * self.rows.shape[1]

    def select(self, index: torch.Tensor | slice) -> BlockWeight:
        """Some rows, in this order."""
        return BlockWeight(self.kind, self.rows[index])

    def columns(self, start: int, stop: int) -> BlockWeight:
        """A run of input features. Raises ConfigError where it cuts a block."""
        size = self.kind.size
        if start % size.num_values or stop % size.num_values:
            raise ConfigError(
                f"a weight of type {self.kind.value!r} is cut at input features {start} and {stop}; "
                f"allowed: multiples of {size.num_values} (fewer ranks, or weights in bfloat16)"
            )
        begin, end = (self.kind.row_bytes(place) for place in (start, stop))
        return BlockWeight(self.kind, self.rows[:, begin:end])

    def decoded(self, rows: slice = slice(None)) -> BlockCodes:
        return decode(self.kind, self.rows[rows].contiguous())

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight's numbers, computed in float32."""
        out_features, in_features = self.shape
        values = torch.empty(out_features, in_features, dtype=dtype)
        step = max(1, _VALUES_AT_ONCE // max(1, in_features))
        for first in range(0, out_features, step):
            part = slice(first, first + step)
            values[part] = self.decoded(part).values()
        return values


def join(weights: Sequence[BlockWeight]) -> BlockWeight:
    """One weight of the rows of several, which have the same type and input features."""
    return BlockWeight(weights[0].kind, torch.cat([weight.rows for weight in weights]))
