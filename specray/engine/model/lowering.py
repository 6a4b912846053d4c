"""Builds the decoder from a configuration and a source of weights, layer by layer.

Each weight is dropped as soon as its packed form exists, so the model is never in memory twice; of a group's
ranks each takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.model.checkpoint.rank_weights import RankWeights
from specray.engine.model.decoder import DecoderForward, DecoderLayer, RecurrentPart
from specray.engine.model.decoder_config import (
    ATTENTION_NORM,
    FINAL_NORM,
    INPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    SINKS,
    DecoderConfig,
    layer_prefix,
)
from specray.engine.model.layers.experts.hits import count_hits
from specray.engine.model.layers.experts.layer import ExpertLayer, Sum
from specray.engine.model.layers.experts.lowering import lower_experts
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.model.layers.experts.shortcut import Shortcut
from specray.engine.model.layers.latent.lowering import lower_latent, lower_latent_down, lower_query_up
from specray.engine.model.layers.latent.projections import LatentOutput
from specray.engine.model.layers.mixer_lowering import by_kind, lower_mixer, rows_of
from specray.engine.model.layers.normed import Absent, NormedProjection, NormedQueries
from specray.engine.model.layers.projections import (
    ReducedLinear,
    lower_linear,
    lower_projection,
    scaled,
)
from specray.engine.model.layers.vocabulary import embedding_and_head
from specray.engine.model.quantized.operator_set import OperatorSet
from specray.engine.model.rotary import rotated_first, tables_of_layers
from specray.engine.step import CacheShape, HeadShape
from specray.engine.weights.stored_weight import StoredWeight, Weight, alike, join

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.checkpoint.source import WeightSource
    from specray.engine.model.decoder import Norm, Projection, RowGate
    from specray.engine.model.layers.normed import Rows
    from specray.engine.model.linear import Gate, Linear
    from specray.engine.model.operators import Operators


def head_shape(config: DecoderConfig, parallel: ParallelContext | None) -> HeadShape:
    """The heads of a model on this rank; with more ranks than key heads, several have the same one."""
    world_size = 1 if parallel is None else parallel.world_size
    num_kv_heads = max(1, config.num_key_value_heads // world_size)
    num_heads = config.num_attention_heads // world_size
    if config.latent is not None:
        size = config.latent.latent_dim
        return HeadShape(num_heads, 1, size + config.head_dim, config.query_scale, size)
    return HeadShape(num_heads, num_kv_heads, config.head_dim, config.query_scale)


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
    taken = RankWeights(weights, parallel)
    if not isinstance(operators, OperatorSet):
        operators = OperatorSet(operators, operators)
    embedding, head, device = embedding_and_head(config, taken, operators, head_rows)
    operators = operators.layers
    attention = operators.attention(tables_of_layers(config, max_model_len, device), shape)
    lowered = [
        lower_layer(index, config, shape, taken, operators) for index in range(config.num_hidden_layers)
    ]
    layers, expert_hits = count_hits(lowered, config.experts, device)
    states = tuple(mixer.shape for layer in layers for mixer in layer.mixers)
    return DecoderForward(
        embedding=embedding,
        layers=layers,
        final_norm=lower_norm(FINAL_NORM, config, taken, operators, factor=config.logit_scale),
        head=head,
        attention=attention,
        cache_shape=CacheShape.of_layers([shape.of_layer] * len(config.attention_layers), states),
        feature_layers=feature_layers,
        expert_hits=expert_hits,
        residual_scale=config.residual_scale,
        logit_scale=config.logit_scale,
        embedding_scale=1.0
        if config.has_scaled_embedding
        else config.embedding_scale / config.residual_scale,
    )


def lower_layer(
    index: int, config: DecoderConfig, shape: HeadShape, taken: RankWeights, operators: Operators
) -> DecoderLayer:
    """Builds one layer; ``shape`` is what :func:`head_shape` says. Raises ConfigError as :func:`lower`."""
    norms = config.norm_names(index)

    def norm(name: str) -> Norm:
        return lower_norm(f"{layer_prefix(index)}{name}.weight", config, taken, operators)

    layer = DecoderLayer(
        input_norm=norm(INPUT_NORM) if INPUT_NORM in norms else Absent(),
        qkv=Absent(),
        head_norm=None,
        output=Absent(),
        post_attention_norm=Absent(),
        gate=Absent(),
        down=Absent(),
        window=None,
    )
    if config.has_mlp(index):
        gate, down = _mlp(index, config, taken, operators)
        added = _before_stream(down, index, MLP_OUTPUT_NORM, config, taken, operators)
        layer = replace(layer, gate=gate, down=added, shortcut=_shortcut(index, config, taken, operators))
        mlp_norm = MLP_NORM if config.has_sandwich(index) else ATTENTION_NORM
        if norms == (INPUT_NORM,):
            return replace(layer, input_norm=Absent(), post_attention_norm=layer.input_norm)
        layer = replace(layer, post_attention_norm=norm(mlp_norm) if mlp_norm in norms else Absent())
    part = _recurrent_part(index, config, taken, operators)
    if index in config.attention_layers:
        return replace(_with_attention(layer, index, config, shape, taken, operators), beside=part)
    assert part is not None, "the layer does something"
    return replace(layer, qkv=part.linear, output=part.output, mixer=part.mixer, place=part.place)


def _recurrent_part(
    index: int, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> RecurrentPart | None:
    """What a layer that keeps a state has; None: it keeps none."""
    layers, prefix = config.recurrent, layer_prefix(index)
    if layers is None or not layers.layers[index]:
        return None
    mixing = lower_mixer(prefix, layers, taken, operators)
    places = f"{prefix}{mixing.output}", mixing.num_outputs, mixing.has_output_bias
    output = lower_projection(*places, taken, operators, scale=mixing.output_scale)
    added = _before_stream(output, index, ATTENTION_NORM, config, taken, operators)
    return RecurrentPart(mixing.linear, mixing.mixer, added, sum(layers.layers[:index]))


def _before_stream(
    projection: Linear | ReducedLinear | Sum,
    index: int,
    norm: str,
    config: DecoderConfig,
    taken: RankWeights,
    operators: Operators,
) -> Projection:
    """The projection, with the norm of what a layer adds to the residual stream where it has one."""
    if not config.has_sandwich(index):
        return projection
    name = f"{layer_prefix(index)}{norm}.weight"
    return NormedProjection(projection, lower_norm(name, config, taken, operators))


def _with_attention(
    layer: DecoderLayer,
    index: int,
    config: DecoderConfig,
    shape: HeadShape,
    taken: RankWeights,
    operators: Operators,
) -> DecoderLayer:
    prefix, sinks = f"{layer_prefix(index)}self_attn.", None
    if config.has_sinks:
        name = f"{layer_prefix(index)}{SINKS}"
        sinks = taken.share(name, config.num_attention_heads, dim=0).float().clone()
    places = f"{prefix}o_proj", config.num_attended, config.has_output_bias
    linear = lower_projection(*places, taken, operators, scale=config.attention_scale)
    output = _before_stream(linear, index, ATTENTION_NORM, config, taken, operators)
    if config.latent is None:
        qkv: Rows = _qkv(prefix, config, taken, operators)
    else:
        qkv, values = lower_latent(layer_prefix(index), config, config.latent, taken, operators)
        output = LatentOutput(values, output)
    return replace(
        layer,
        qkv=qkv,
        head_norm=_head_norm(prefix, config, shape, taken) if config.has_head_norm else None,
        output=output,
        window=config.windows[index],
        sinks=sinks,
        output_gate=_output_gate(prefix, config, taken, operators),
        place=config.attention_layers.index(index),
    )


def changeable_linears(
    index: int, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> dict[str, Callable[[], object]]:
    """Makes a layer's linear layers that adapters may change, by the names of ``parts.MODULES``."""
    prefix = layer_prefix(index)

    def local(name: str, size: int) -> object:
        made = lower_projection(f"{prefix}{name}", size, False, taken, operators)
        return made.local if isinstance(made, ReducedLinear) else made

    def qkv() -> object:
        if config.latent is not None:
            return lower_latent_down(prefix, config, config.latent, taken, operators)
        made = _qkv(f"{prefix}self_attn.", config, taken, operators)
        return made.linear if isinstance(made, NormedQueries) else made

    def query_up() -> object:
        assert config.latent is not None, "only latent attention has one"
        return lower_query_up(prefix, config, config.latent, taken, operators)

    return {
        "qkv": qkv,
        "query_up": query_up,
        "output_gate": lambda: _output_gate(f"{prefix}self_attn.", config, taken, operators),
        "output": lambda: local("self_attn.o_proj", config.num_attended),
        "gate": lambda: _gate(f"{prefix}mlp.", config, taken, operators),
        "down": lambda: local("mlp.down_proj", config.intermediate_size),
    }


def lower_norm(
    name: str, config: DecoderConfig, taken: RankWeights, operators: Operators, *, factor: float = 1.0
) -> Norm:
    """A norm over the hidden size, and a factor of what it gives. Raises ConfigError as :func:`lower`.

    Everything in the residual stream is divided by its scale (``vocabulary.embedding_scale``), which a norm
    undoes but for the number that keeps it from dividing by zero.
    """
    weight = _norm_weight(name, config, taken)
    if factor != 1.0:
        weight = weight.float() * factor
    return operators.norm(weight, config.rms_norm_eps / config.residual_scale**2)


def _norm_weight(name: str, config: DecoderConfig, taken: RankWeights) -> torch.Tensor:
    """Weight of a norm, in float32 where rounding the sum would lose what the checkpoint says."""
    weight = taken.whole(name)
    return 1.0 + weight.float() if config.has_shifted_norms else weight


def _qkv(
    prefix: str, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> Linear | NormedQueries:
    num_queries = config.num_attention_heads * config.head_dim
    num_keys, order = config.num_key_value_heads * config.head_dim, rotated_first(config)

    names = [f"{prefix}{name}_proj" for name in "qkv"]
    firsts: list[int | None] = [None, None, None]
    if config.has_joined_queries:
        names, firsts = [f"{prefix}qkv_proj"] * 3, [0, num_queries, num_queries + num_keys]
    parts = [
        taken.part(num_queries, dim=0, first=firsts[0]),
        *(taken.key_heads(config, first) for first in firsts[1:]),
    ]
    if config.has_output_gate:
        parts[0] = taken.part(2 * num_queries, dim=0)
    weights: list[Weight] = [
        taken.weight(f"{name}.weight", part) for name, part in zip(names, parts, strict=True)
    ]
    biases = []
    if config.has_qkv_bias:
        biases = [taken.weights.take(f"{name}.bias", part) for name, part in zip(names, parts, strict=True)]
    if config.has_output_gate:
        index = by_kind(weights[0].shape[0], (config.head_dim,) * 2).chunk(2)[0]
        weights[0] = rows_of(weights[0], index)
        biases[:1] = (bias[index.to(bias.device)] for bias in biases[:1])
    if order is not None:
        weights[:2] = (_reordered(weight, order) for weight in weights[:2])
        biases[:2] = (_reordered_numbers(bias, order) for bias in biases[:2])
    linear = lower_linear(join(weights), torch.cat(biases) if biases else None, operators)
    if not config.has_whole_norm:
        return linear
    norms = [
        taken.weights.take(f"{prefix}{name}_norm.weight", part).clone()
        for name, part in (("q", taken.part(num_queries, dim=0)), ("k", taken.key_heads(config)))
    ]
    query, key = norms if order is None else [_reordered_numbers(norm, order) for norm in norms]
    return NormedQueries(linear, (query, key), config.rms_norm_eps, taken.parallel)


def _output_gate(
    prefix: str, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> RowGate | None:
    """The gate whose rows lie behind those of each head's queries, or that has one number for each head."""
    if config.has_head_gates:
        weight = taken.weight(f"{prefix}g_proj.weight", taken.part(config.num_attention_heads, dim=0))
        width = config.head_dim if config.latent is None else config.latent.latent_dim
        return operators.row_gate(lower_linear(weight, None, operators), weight.shape[0], width)
    if not config.has_output_gate:
        return None
    num_queries = config.num_attention_heads * config.head_dim
    part = taken.part(2 * num_queries, dim=0)
    both = taken.weight(f"{prefix}q_proj.weight", part)
    index = by_kind(both.shape[0], (config.head_dim,) * 2).chunk(2)[1]
    bias = None
    if config.has_qkv_bias:
        bias = taken.weights.take(f"{prefix}q_proj.bias", part)[index]
    return operators.row_gate(lower_linear(rows_of(both, index), bias, operators), len(index))


def _reordered(weight: Weight, order: torch.Tensor) -> Weight:
    if isinstance(weight, StoredWeight):
        return weight.select(_reordered_numbers(torch.arange(weight.shape[0]), order))
    return _reordered_numbers(weight, order)


def _reordered_numbers(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    heads = weight.view(-1, len(order), *weight.shape[1:])
    return heads[:, order.to(weight.device)].reshape(weight.shape)


def _mlp(
    index: int, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> tuple[Gate | ExpertLayer | WithSharedMlp, Linear | ReducedLinear | Sum]:
    prefix = layer_prefix(index)
    if config.experts is not None and config.has_routed_mlp(index):
        return lower_experts(prefix, config.experts, config, taken, operators), Sum(taken.parallel)
    down = lower_projection(
        f"{prefix}mlp.down_proj",
        config.intermediate_size,
        config.has_mlp_bias,
        taken,
        operators,
        scale=config.down_scale,
    )
    return _gate(f"{prefix}mlp.", config, taken, operators), down


def _shortcut(index: int, config: DecoderConfig, taken: RankWeights, operators: Operators) -> Shortcut | None:
    experts = config.experts
    if experts is None or not (experts.is_shortcut and experts.layers[index]):
        return None
    made = lower_experts(layer_prefix(index), experts, config, taken, operators)
    assert isinstance(made, ExpertLayer), "no other MLP is beside them"
    return Shortcut(made, experts.num_experts, taken.is_first, Sum(taken.parallel))


def _gate(prefix: str, config: DecoderConfig, taken: RankWeights, operators: Operators) -> Gate:
    size = config.intermediate_size
    names = [f"{prefix}{name}_proj" for name in ("gate", "up")]
    firsts: list[int | None] = [None, None]
    if config.has_joined_gates:
        names, firsts = [f"{prefix}gate_up_proj"] * 2, [0, size]
    places = [(name, taken.part(size, dim=0, first=first)) for name, first in zip(names, firsts, strict=True)]
    if not config.has_gated_mlps:
        name, part = places[1]
        bias = taken.weights.take(f"{name}.bias", part).clone() if config.has_mlp_bias else None
        return operators.squared(lower_linear(taken.weight(f"{name}.weight", part), bias, operators))
    weights = [taken.weight(f"{name}.weight", part) for name, part in places]
    if config.gate_scale != 1.0:
        weights[0] = scaled(taken.weights.take(f"{names[0]}.weight", places[0][1]), config.gate_scale)
    gate, up = alike(weights)
    if not config.has_mlp_bias:
        return operators.gate(gate, up, None, None, config.activation)
    gate_bias, up_bias = (taken.weights.take(f"{name}.bias", part).clone() for name, part in places)
    gate_bias = scaled(gate_bias, config.gate_scale)
    if isinstance(gate, torch.Tensor):
        gate_bias, up_bias = gate_bias.to(gate.dtype), up_bias.to(gate.dtype)
    return operators.gate(gate, up, gate_bias, up_bias, config.activation)


def _head_norm(prefix: str, config: DecoderConfig, shape: HeadShape, taken: RankWeights) -> HeadNorm:
    query, key = (_norm_weight(f"{prefix}{name}_norm.weight", config, taken) for name in "qk")
    order = rotated_first(config)
    if order is not None:
        query, key = (weight[order.to(weight.device)] for weight in (query, key))
    weight = torch.cat((query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)))
    return HeadNorm(weight, config.rms_norm_eps)
