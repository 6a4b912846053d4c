"""Builds the decoder from a configuration and a source of weights, layer by layer.

Each weight is dropped as soon as its packed form exists, so the model is never in memory twice; of a group's
ranks each takes its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specray.engine.model.checkpoint.source import Part
from specray.engine.model.decoder import DecoderForward, HeadNorm, Layer
from specray.engine.model.decoder_config import EMBEDDING, FINAL_NORM, HEAD, DecoderConfig, layer_prefix
from specray.engine.model.quantized.operator_set import OperatorSet
from specray.engine.model.rotary import cos_sin
from specray.engine.step import CacheShape, HeadShape

if TYPE_CHECKING:
    from specray.engine.model.checkpoint.source import WeightSource
    from specray.engine.model.decoder import Embedding, Head, Projection
    from specray.engine.model.linear import Gate, Linear
    from specray.engine.model.operators import Operators
    from specray.engine.runner.parallel import ParallelContext


def head_shape(config: DecoderConfig, parallel: ParallelContext | None) -> HeadShape:
    """The heads of a model on this rank; with more ranks than key heads, several have the same one."""
    world_size = 1 if parallel is None else parallel.world_size
    num_kv_heads = max(1, config.num_key_value_heads // world_size)
    return HeadShape(config.num_attention_heads // world_size, num_kv_heads, config.head_dim)


def lower(
    config: DecoderConfig,
    weights: WeightSource,
    operators: Operators | OperatorSet,
    parallel: ParallelContext | None = None,
    *,
    max_model_len: int,
    feature_layers: tuple[int, ...] = (),
    head_rows: torch.Tensor | None = None,
) -> DecoderForward:
    """Builds the decoder.

    Args:
        operators: what it is made of, on the weights' device and in their data type; a set where weights are
            quantised.
        parallel: the group over which the model is sharded.
        max_model_len: tokens of the longest sequence.
        feature_layers: layers whose input is part of the output, on the first rank alone; numbered as
            ``step.ForwardOutput`` says.
        head_rows: rows of the head's weight that are computed, in this order; None: all as they are.

    Raises:
        ConfigError: a weight cannot be read, or holds NaN or infinite values.
    """
    shape = head_shape(config, parallel)
    if parallel is not None and parallel.rank > 0:
        # Others need not keep any, but where the last layer computes all rows, it does so on every rank.
        feature_layers = tuple(layer for layer in feature_layers if layer >= config.num_hidden_layers)
    taken = _Taken(weights, parallel)
    if not isinstance(operators, OperatorSet):
        operators = OperatorSet(operators, operators)
    embedding, head, device = _embedding_and_head(config, taken, operators, head_rows)
    operators = operators.layers
    attention = operators.attention(*cos_sin(config, max_model_len, device), shape)
    layers = tuple(
        _lower_layer(index, config, shape, taken, operators) for index in range(config.num_hidden_layers)
    )
    return DecoderForward(
        embedding=embedding,
        layers=layers,
        final_norm=operators.norm(taken.whole(FINAL_NORM), config.rms_norm_eps),
        head=head,
        attention=attention,
        cache_shape=CacheShape(len(layers), shape.num_kv_heads, shape.head_dim),
        feature_layers=feature_layers,
    )


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
class ReducedLinear:
    """Some input features of a linear layer: the ranks' results are summed."""

    local: Linear
    bias: torch.Tensor | None
    parallel: ParallelContext

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        total = self.parallel.all_reduce(self.local(rows))
        return total.add_(summand) if self.bias is None else total.add_(self.bias).add_(summand)


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """Some rows of the head: each rank has the logits of some tokens, until they are joined."""

    local: Linear
    num_logits: int
    parallel: ParallelContext

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self.local(rows)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks."""
        return self.parallel.all_gather(logits, self.num_logits).float()


@dataclass(frozen=True, slots=True)
class _Taken:
    """This rank's part of each weight."""

    weights: WeightSource
    parallel: ParallelContext | None

    def whole(self, name: str) -> torch.Tensor:
        """A small weight that stays as it is."""
        return self.weights.take(name).clone()

    def share(self, name: str, total: int, *, dim: int) -> torch.Tensor:
        """One rank's equal run of ``total`` rows or columns; the last ranks' may be shorter."""
        if self.parallel is None:
            return self.weights.take(name)
        return self.weights.take(name, Part(dim, *self._run(total, self.parallel)))

    def key_heads(self, name: str, config: DecoderConfig) -> torch.Tensor:
        """Rows of one rank's key or value heads: an equal run, or the one head that its queries share."""
        num_heads, head_dim = config.num_key_value_heads, config.head_dim
        if self.parallel is None or self.parallel.world_size <= num_heads:
            return self.share(name, num_heads * head_dim, dim=0)
        start = self.parallel.rank * num_heads // self.parallel.world_size * head_dim
        return self.weights.take(name, Part(0, start, start + head_dim))

    def chosen(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """One rank's equal run of some rows of a weight."""
        weight = self.weights.take(name)
        if self.parallel is not None:
            rows = rows[slice(*self._run(len(rows), self.parallel))]
        return weight[rows.to(weight.device)]

    def _run(self, total: int, parallel: ParallelContext) -> tuple[int, int]:
        start = min(parallel.first_row(total), total)
        return start, min(start + -(-total // parallel.world_size), total)


def _lower_layer(
    index: int, config: DecoderConfig, shape: HeadShape, taken: _Taken, operators: Operators
) -> Layer:
    prefix, eps = layer_prefix(index), config.rms_norm_eps
    num_queries = config.num_attention_heads * config.head_dim
    return Layer(
        input_norm=operators.norm(taken.whole(f"{prefix}input_layernorm.weight"), eps),
        qkv=_qkv(f"{prefix}self_attn.", config, taken, operators),
        head_norm=_head_norm(f"{prefix}self_attn.", config, shape, taken) if config.has_head_norm else None,
        output=_projection(
            f"{prefix}self_attn.o_proj", num_queries, config.has_output_bias, taken, operators
        ),
        post_attention_norm=operators.norm(taken.whole(f"{prefix}post_attention_layernorm.weight"), eps),
        gate=_gate(f"{prefix}mlp.", config, taken, operators),
        down=_projection(
            f"{prefix}mlp.down_proj", config.intermediate_size, config.has_mlp_bias, taken, operators
        ),
        window=config.windows[index],
    )


def _qkv(prefix: str, config: DecoderConfig, taken: _Taken, operators: Operators) -> Linear:
    """One linear layer of queries, keys and values, one after the other."""
    num_queries = config.num_attention_heads * config.head_dim

    def joined(kind: str) -> torch.Tensor:
        query = taken.share(f"{prefix}q_proj.{kind}", num_queries, dim=0)
        key, value = (taken.key_heads(f"{prefix}{name}_proj.{kind}", config) for name in "kv")
        return torch.cat([query, key, value])

    return operators.linear(joined("weight"), joined("bias") if config.has_qkv_bias else None)


def _gate(prefix: str, config: DecoderConfig, taken: _Taken, operators: Operators) -> Gate:
    def share(name: str) -> torch.Tensor:
        return taken.share(f"{prefix}{name}", config.intermediate_size, dim=0)

    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if config.has_mlp_bias:
        biases = share("gate_proj.bias").clone(), share("up_proj.bias").clone()
    return operators.gate(share("gate_proj.weight"), share("up_proj.weight"), *biases)


def _projection(
    name: str, in_features: int, has_bias: bool, taken: _Taken, operators: Operators
) -> Projection:
    weight = taken.share(f"{name}.weight", in_features, dim=1)
    bias = taken.whole(f"{name}.bias") if has_bias else None
    if taken.parallel is None:
        return operators.linear(weight, bias)
    return ReducedLinear(operators.linear(weight, None), bias, taken.parallel)


def _head_norm(prefix: str, config: DecoderConfig, shape: HeadShape, taken: _Taken) -> HeadNorm:
    query, key = taken.whole(f"{prefix}q_norm.weight"), taken.whole(f"{prefix}k_norm.weight")
    weight = torch.cat((query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)))
    return HeadNorm(weight, config.rms_norm_eps)


def _embedding_and_head(
    config: DecoderConfig, taken: _Taken, operators: OperatorSet, head_rows: torch.Tensor | None
) -> tuple[Embedding, Head, torch.device]:
    """Both, and the device that they are on; a group's ranks share the vocabulary in equal runs."""
    vocab_size, parallel, is_tied = config.vocab_size, taken.parallel, config.tie_word_embeddings
    table = taken.share(EMBEDDING, vocab_size, dim=0)
    if operators.embedding is None:
        table = table.clone()
    if head_rows is not None:
        head_weight = taken.chosen(EMBEDDING if is_tied else HEAD, head_rows)
    else:
        head_weight = table if is_tied else taken.share(HEAD, vocab_size, dim=0)
    num_logits = vocab_size if head_rows is None else len(head_rows)
    # The table is needed in its own layout for look-ups, so a tied head is a second copy where it is packed.
    head = operators.head.linear(head_weight, None)
    embedding: Embedding = TableEmbedding(table)
    if operators.embedding is not None:
        embedding = operators.embedding(table, head if is_tied and head_rows is None else None)
    if parallel is None:
        return embedding, head, table.device
    embedding = ShardedEmbedding(embedding, len(table), parallel.first_row(vocab_size), parallel)
    return embedding, GatheredHead(head, num_logits, parallel), table.device
