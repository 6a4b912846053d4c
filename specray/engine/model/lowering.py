"""Turns a loaded transformers model into our own decoder: takes the weights out, module by module.

Each original weight is dropped as soon as its packed form exists, so the model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from specray.engine.model.decoder import DecoderForward, HeadNorm, Layer
from specray.engine.step import CacheShape, HeadShape

if TYPE_CHECKING:
    from specray.engine.model.decoder import Attention, Embedding, Head, Norm, Projection
    from specray.engine.model.linear import Gate, Linear
    from specray.engine.model.loaded import LoadedModel
    from specray.engine.model.operators import Operators
    from specray.engine.runner.parallel import ParallelContext

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def can_lower(config: Any) -> bool:
    """Whether the decoder computes what a text configuration describes."""
    rope = getattr(config, "rope_parameters", None) or {}
    rotary_share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return config.model_type in _MODEL_TYPES and config.hidden_act == "silu" and rotary_share == 1.0


def head_shape(config: Any, parallel: ParallelContext | None) -> HeadShape:
    """The heads of a model that the decoder covers, on this rank."""
    world_size = 1 if parallel is None else parallel.world_size
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    return HeadShape(num_heads // world_size, num_kv_heads // world_size, _head_dim(config))


def lower(
    loaded: LoadedModel,
    operators: Operators,
    parallel: ParallelContext | None = None,
    feature_layers: tuple[int, ...] = (),
) -> DecoderForward:
    """Builds the decoder. The model's modules are empty afterwards.

    Args:
        operators: what it is made of, on the model's device and in its data type.
        parallel: the group over which the model was sharded when it was loaded.
        feature_layers: layers whose input is part of the output.
    """
    model, config = loaded.model, loaded.config
    base: Any = model.base_model
    shape = head_shape(config, parallel)
    attention = _attention(base.rotary_emb, loaded, shape, operators)
    embedding, head = _embedding_and_head(model, parallel, operators)
    layers = tuple(_lower_layer(layer, config, shape.head_dim, parallel, operators) for layer in base.layers)
    return DecoderForward(
        embedding=embedding,
        layers=layers,
        final_norm=_norm(base.norm, operators),
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


@dataclass(frozen=True, slots=True)
class ShardedEmbedding:
    """Some rows of the table; a token of another rank is a zero here, and the sum has them all."""

    table: torch.Tensor  # [num_local_tokens, hidden_size]
    first_token_id: int
    parallel: ParallelContext

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.first_token_id
        is_elsewhere = (local < 0) | (local >= self.table.shape[0])
        rows = F.embedding(local.masked_fill_(is_elsewhere, 0), self.table)
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
    """Some rows of the vocabulary: the ranks' logits are joined."""

    local: Linear
    vocab_size: int
    parallel: ParallelContext

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_gather(self.local(rows), self.vocab_size).float()


def _lower_layer(
    layer: Any, config: Any, head_dim: int, parallel: ParallelContext | None, operators: Operators
) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    head_norm = _head_norm(attention, head_dim) if hasattr(attention, "q_norm") else None
    return Layer(
        input_norm=_norm(layer.input_layernorm, operators),
        qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj], operators),
        head_norm=head_norm,
        output=_projection(attention.o_proj, parallel, operators),
        post_attention_norm=_norm(layer.post_attention_layernorm, operators),
        gate=_gate(mlp, operators),
        down=_projection(mlp.down_proj, parallel, operators),
        window=window,
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a sharded tensor, without its history."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return None if tensor is None else tensor.detach()


def _take(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Takes weight and bias out of a module, so that nothing else keeps them alive."""
    weight, bias = _local(module.weight), _local(getattr(module, "bias", None))
    assert weight is not None, "a module's weight was taken twice"
    module.weight = None
    return weight, bias


def _linear(modules: Sequence[Any], operators: Operators) -> Linear:
    """One linear layer of all the modules' outputs, one after the other."""
    taken = [_take(module) for module in modules]
    weights, biases = [weight for weight, _ in taken], [bias for _, bias in taken]
    bias = None
    if any(part is not None for part in biases):
        bias = torch.cat(
            [part if part is not None else weight.new_zeros(weight.shape[0]) for weight, part in taken]
        )
    return operators.linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _gate(mlp: Any, operators: Operators) -> Gate:
    gate, gate_bias = _take(mlp.gate_proj)
    up, up_bias = _take(mlp.up_proj)
    return operators.gate(gate, up, gate_bias, up_bias)


def _projection(module: Any, parallel: ParallelContext | None, operators: Operators) -> Projection:
    weight, bias = _take(module)
    if parallel is None:
        return operators.linear(weight, bias)
    return ReducedLinear(operators.linear(weight, None), bias, parallel)


def _norm(module: Any, operators: Operators) -> Norm:
    weight, _ = _take(module)
    return operators.norm(weight, module.variance_epsilon)


def _head_norm(attention: Any, head_dim: int) -> HeadNorm:
    counts = [attention.q_proj.weight, attention.k_proj.weight]
    num_heads, num_kv_heads = [_rows(weight) // head_dim for weight in counts]
    query, _ = _take(attention.q_norm)
    key, _ = _take(attention.k_norm)
    weight = torch.cat((query.expand(num_heads, -1), key.expand(num_kv_heads, -1)))
    return HeadNorm(weight, attention.q_norm.variance_epsilon)


def _rows(weight: torch.Tensor) -> int:
    local = _local(weight)
    assert local is not None
    return local.shape[0]


def _attention(rotary: Any, loaded: LoadedModel, shape: HeadShape, operators: Operators) -> Attention:
    like = torch.empty(0, dtype=torch.float32, device=loaded.device)
    positions = torch.arange(loaded.max_model_len, device=loaded.device)
    cos, sin = (table[0] for table in rotary(like, position_ids=positions[None]))
    return operators.attention(cos, sin, shape)


def _embedding_and_head(
    model: Any, parallel: ParallelContext | None, operators: Operators
) -> tuple[Embedding, Head]:
    is_tied = model.lm_head.weight is model.base_model.embed_tokens.weight
    vocab_size = model.config.get_text_config().vocab_size
    table, _ = _take(model.base_model.embed_tokens)
    head_weight, head_bias = (table, None) if is_tied else _take(model.lm_head)
    model.lm_head.weight = None
    # The table is needed in its own layout for look-ups, so a tied head is a second copy where it is packed.
    head = operators.linear(head_weight, head_bias)
    if parallel is None:
        return TableEmbedding(table), head
    first = parallel.first_row(vocab_size)
    is_sharded = table.shape[0] < vocab_size
    embedding = ShardedEmbedding(table, first, parallel) if is_sharded else TableEmbedding(table)
    if head_weight.shape[0] == vocab_size:
        return embedding, head
    return embedding, GatheredHead(head, vocab_size, parallel)
