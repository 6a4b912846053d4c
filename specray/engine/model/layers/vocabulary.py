"""The ends of a model: look-ups of tokens, and the logits of a group's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specray.engine.model.decoder_config import EMBEDDING, HEAD
from specray.engine.model.linear import PlainLinear
from specray.engine.weights.stored_weight import StoredWeight, Weight

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.decoder import Embedding, OutputHead
    from specray.engine.model.decoder_config import DecoderConfig
    from specray.engine.model.linear import Linear
    from specray.engine.model.quantized.operator_set import OperatorSet


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
        if isinstance(self.local, PlainLinear):
            self.local.into(rows, out)
        else:
            out.copy_(self.local(rows))

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_gather(logits, self.num_logits)


def _look_ups(
    config: DecoderConfig, table: Weight, tied_head: Linear | None, operators: OperatorSet
) -> Embedding:
    """The table with the model's scale: in its numbers where no other part holds the same memory."""
    if isinstance(table, StoredWeight):
        make = operators.embedding or operators.stored_embedding
        assert make is not None, "it would have come as numbers"
        embedding = make(table, tied_head)
        scale = embedding_scale(config, operators.dtype)
        return embedding if scale == 1.0 else ScaledEmbedding(embedding, scale)
    scale = embedding_scale(config, table.dtype)
    if scale == 1.0:
        if operators.embedding is not None:
            return operators.embedding(table, tied_head)
        return TableEmbedding(table)
    if operators.embedding is not None:
        return operators.embedding(table * scale, None)
    if tied_head is not None and table.device.type != "cpu":
        return ScaledEmbedding(TableEmbedding(table), scale)
    return TableEmbedding(table * scale)


def rounded_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    return float(torch.tensor(config.embedding_scale, dtype=dtype)) if config.has_scaled_embedding else 1.0


def embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    """Factor of the residual stream's input: one division in place of a factor in each layer's addition."""
    scale = rounded_scale(config, dtype) if config.has_scaled_embedding else config.embedding_scale
    return scale / config.residual_scale


def embedding_and_head(
    config: DecoderConfig, taken: RankWeights, operators: OperatorSet, head_rows: torch.Tensor | None
) -> tuple[Embedding, OutputHead, torch.device]:
    """Both ends of a model on this rank, and its device; ``head_rows`` as ``lowering.lower`` has them."""
    vocab_size, parallel, is_tied = config.vocab_size, taken.parallel, config.tie_word_embeddings
    part = taken.part(vocab_size, dim=0)
    has_makers = operators.embedding is not None or operators.stored_embedding is not None
    table = taken.weight(EMBEDDING, part) if has_makers else taken.weights.take(EMBEDDING, part)
    if isinstance(table, torch.Tensor) and operators.embedding is None:
        table = table.clone()
    if head_rows is not None:
        head_weight = taken.chosen(EMBEDDING if is_tied else HEAD, head_rows)
    else:
        head_weight = table if is_tied else taken.weight(HEAD, part)
    num_logits = vocab_size if head_rows is None else len(head_rows)
    # The table is needed in its own layout for look-ups, so a tied head is a second copy where it is packed.
    head = operators.head.linear(head_weight, None)
    embedding = _look_ups(config, table, head if is_tied and head_rows is None else None, operators)
    device = operators.device if isinstance(table, StoredWeight) else table.device
    if parallel is None:
        return embedding, head, device
    embedding = ShardedEmbedding(embedding, table.shape[0], parallel.first_row(vocab_size), parallel)
    return embedding, GatheredHead(head, num_logits, parallel), device
