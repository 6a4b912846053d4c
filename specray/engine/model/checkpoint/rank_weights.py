"""One rank's part of each of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.model.checkpoint.source import WeightPart

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
        """This rank's equal run of ``total`` rows or columns from ``first`` on; None: of the whole weight."""
        start, stop = self.run(total)
        if self.parallel is None and first is None:
            return self.weights.take(name)
        begin = first or 0
        return self.weights.take(name, WeightPart(dim, begin + start, begin + stop))

    def key_heads(self, name: str, config: DecoderConfig, first: int | None = None) -> torch.Tensor:
        """Rows of one rank's key or value heads: an equal run, or the one head that its queries share."""
        num_heads, head_dim = config.num_key_value_heads, config.head_dim
        if self.parallel is None or self.parallel.world_size <= num_heads:
            return self.share(name, num_heads * head_dim, dim=0, first=first)
        start = self.parallel.rank * num_heads // self.parallel.world_size * head_dim + (first or 0)
        return self.weights.take(name, WeightPart(0, start, start + head_dim))

    def chosen(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """One rank's equal run of some rows of a weight."""
        weight = self.weights.take(name)
        if self.parallel is not None:
            rows = rows[slice(*self.run(len(rows)))]
        return weight[rows.to(weight.device)]

    def run(self, total: int) -> tuple[int, int]:
        """First and last + 1 of this rank's equal run of ``total`` rows or columns."""
        if self.parallel is None:
            return 0, total
        start = min(self.parallel.first_row(total), total)
        return start, min(start + -(-total // self.parallel.world_size), total)
