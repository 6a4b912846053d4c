"""A weight in the file's own bits: rows of blocks as they lie in the file, cut and joined undecoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.weights.block_codes import BlockCodes, decode
from specray.engine.weights.block_type import BlockType
from specray.errors import ConfigError

_HALVES: dict[BlockType, tuple[int, ...]] = {
    BlockType.Q4_1: (0, 2),
    BlockType.Q5_1: (0, 2),
    BlockType.Q4_K: (0, 2),
    BlockType.Q5_K: (0, 2),
    BlockType.Q6_K: (208,),
}
"""Bytes before each float16 of a block; of other types it is the first two bytes."""
_LARGEST_EXPONENT = 252
"""Largest exponent of MXFP4 with which every code has a value below the limit of float32."""
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

    @property
    def unit(self) -> int:
        """Input features of a block."""
        return self.kind.size.num_values

    def is_like(self, other: object) -> bool:
        """Whether rows of both can stand in one weight."""
        return isinstance(other, BlockWeight) and self.kind is other.kind

    def joined(self, others: Sequence[Any]) -> BlockWeight:
        """The weight with the rows of others, which are alike, below its own."""
        return BlockWeight(self.kind, torch.cat([self.rows, *(each.rows for each in others)]))

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

    def reordered(self, columns: torch.Tensor) -> BlockWeight:
        """The weight with its input features in another order, which takes blocks as a whole; int64."""
        size = self.kind.size
        blocks = columns[:: size.num_values] // size.num_values
        rows = self.rows.reshape(len(self.rows), -1, size.num_bytes)[:, blocks]
        return BlockWeight(self.kind, rows.reshape(self.rows.shape))

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite: blocks have no other numbers that could be."""
        blocks = self.rows.reshape(-1, self.kind.size.num_bytes)
        if self.kind is BlockType.MXFP4:
            are_small = bool((blocks[:, 0] <= _LARGEST_EXPONENT).all())
            return are_small or bool(self.values().isfinite().all())
        places = _HALVES.get(self.kind, (0,))
        halves = [blocks[:, at : at + 2].contiguous().view(torch.float16) for at in places]
        return all(bool(half.isfinite().all()) for half in halves)

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
