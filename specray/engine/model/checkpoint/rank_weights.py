"""One rank's part of each of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.weights.stored_weight import StoredWeight, Weight

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.checkpoint.source import WeightSource
    from specray.engine.model.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class RankWeights:
    """This rank's part of each weight."""

    weights: WeightSource
    parallel: ParallelContext | None

    def whole(self, name: str) -> torch.Tensor:
        return self.weights.take(name).clone()

    @property
    def is_first(self) -> bool:
        return self.parallel is None or self.parallel.rank == 0

    def share(self, name: str, total: int, *, dim: int, first: int | None = None) -> torch.Tensor:
        """This rank's numbers of the run that :meth:`part` means."""
        return self.weights.take(name, self.part(total, dim=dim, first=first))

    def part(self, total: int, *, dim: int, first: int | None = None) -> WeightPart | None:
        """This rank's equal run of ``total`` rows or columns from ``first`` on; None: the whole weight."""
        start, stop = self.run(total)
        if self.parallel is None and first is None:
            return None
        begin = first or 0
        return WeightPart(dim, begin + start, begin + stop)

    def weight(self, name: str, part: WeightPart | None = None) -> Weight:
        """A linear layer's weight in the file's own bits where the source has it so, else its numbers."""
        stored = self.weights.stored(name, part)
        return self.weights.take(name, part) if stored is None else stored

    def key_heads(self, config: DecoderConfig, first: int | None = None) -> WeightPart | None:
        """Rows of one rank's key or value heads."""
        return self.heads(config.num_key_value_heads, config.head_dim, first)

    def heads(self, num_heads: int, size: int, first: int | None = None) -> WeightPart | None:
        """Rows of one rank's share of some heads: an equal run, or the one that several ranks have."""
        if self.parallel is None or self.parallel.world_size <= num_heads:
            return self.part(num_heads * size, dim=0, first=first)
        start = self.parallel.rank * num_heads // self.parallel.world_size * size + (first or 0)
        return WeightPart(0, start, start + size)

    def chosen(self, name: str, rows: torch.Tensor) -> Weight:
        """One rank's equal run of some rows of a linear layer's weight."""
        if self.parallel is not None:
            rows = rows[slice(*self.run(len(rows)))]
        weight = self.weight(name)
        return weight.select(rows) if isinstance(weight, StoredWeight) else weight[rows.to(weight.device)]

    def run(self, total: int) -> tuple[int, int]:
        """First and last + 1 of this rank's equal run of ``total`` rows or columns."""
        if self.parallel is None:
            return 0, total
        start = min(self.parallel.first_row(total), total)
        return start, min(start + -(-total // self.parallel.world_size), total)
