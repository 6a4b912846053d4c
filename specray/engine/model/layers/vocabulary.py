"""The ends of a model: look-ups of tokens, and the logits of a group's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specray.engine.model.linear import PlainLinear

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.decoder import Embedding
    from specray.engine.model.linear import Linear


@dataclass(frozen=True, slots=True)
class TableEmbedding:
    """The whole table on this rank."""

    table: torch.Tensor  # [vocab_size, hidden_size]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.table)

    def into(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the hidden states to ``out``."""
        torch.index_select(self.table, 0, token_ids, out=out)


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """Look-ups in a table that another part shares, or that is stored, times a factor."""

    table: Embedding
    scale: float

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table(token_ids).mul_(self.scale)

    def into(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the hidden states to ``out``."""
        torch.mul(self.table(token_ids), self.scale, out=out)


@dataclass(frozen=True, slots=True)
class ShardedEmbedding:
    """Some rows of the table; a token of another rank is a zero here, and the sum has them all."""

    local: Embedding
    num_local_tokens: int
    first_token_id: int
    parallel: ParallelContext

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.first_token_id
        is_elsewhere = (local < 0) | (local >= self.num_local_tokens)
        rows = self.local(local.masked_fill_(is_elsewhere, 0))
        return self.parallel.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """Some rows of the head: each rank has the logits of some tokens, until they are joined."""

    local: Linear
    num_logits: int
    parallel: ParallelContext

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self.local(rows)

    def precise_into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Writes what ``precise`` gives to ``out``."""
        if isinstance(self.local, PlainLinear):
            self.local.into(rows, out)
        else:
            out.copy_(self.local(rows))

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_gather(logits, self.num_logits)
