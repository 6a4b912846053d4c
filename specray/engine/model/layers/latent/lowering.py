"""Builds the projections around latent attention; each rank has its heads and the whole latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specray.engine.model.layers.latent.config import (
    LATENT_DOWN,
    LATENT_NORM,
    LATENT_UP,
    NORM_EPS,
    QUERY,
    QUERY_DOWN,
    QUERY_NORM,
    QUERY_UP,
    LatentAttention,
)
from specray.engine.model.layers.latent.projections import HeadProduct, LatentQueries
from specray.engine.model.layers.mixer_lowering import rows_of
from specray.engine.model.rotary import rotated_first
from specray.engine.weights.stored_weight import Weight, join

if TYPE_CHECKING:
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.decoder_config import DecoderConfig
    from specray.engine.model.layers.normed import Rows
    from specray.engine.model.linear import Linear
    from specray.engine.model.operators import Operators


def lower_latent(
    prefix: str, config: DecoderConfig, latent: LatentAttention, taken: RankWeights, operators: Operators
) -> tuple[Rows, HeadProduct]:
    """What makes queries and keys, and what makes values of latents; ``prefix`` is the layer's."""
    norm = up = None
    if latent.query_rank is not None:
        norm = operators.norm(taken.whole(f"{prefix}{QUERY_NORM}"), NORM_EPS)
        up = lower_query_up(prefix, config, latent, taken, operators)
    down = lower_latent_down(prefix, config, latent, taken, operators)
    keys, values = _by_head(prefix, config, latent, taken)
    latent_norm = taken.whole(f"{prefix}{LATENT_NORM}")
    if latent.latent_factor != 1.0:
        latent_norm = latent_norm.float() * latent.latent_factor
    queries = LatentQueries(
        down,
        norm,
        up,
        operators.norm(latent_norm, NORM_EPS),
        operators.head_product(keys),
        config.head_dim,
    )
    return operators.inputs(queries), operators.head_product(values)


def lower_latent_down(
    prefix: str, config: DecoderConfig, latent: LatentAttention, taken: RankWeights, operators: Operators
) -> Linear:
    """The linear layer ``LatentQueries.down``."""
    if latent.query_rank is None:
        query_dim = latent.plain_dim + config.head_dim
        part = taken.part(config.num_attention_heads * query_dim, dim=0)
        query = _rotated_last(taken.weight(f"{prefix}{QUERY}.weight", part), query_dim, config)
    else:
        query = taken.weight(f"{prefix}{QUERY_DOWN}.weight")
    key_dim = latent.latent_dim + config.head_dim
    key = _rotated_last(taken.weight(f"{prefix}{LATENT_DOWN}.weight"), key_dim, config)
    joined, bias = join([query, key]), None
    if config.has_qkv_bias:
        key_bias = taken.whole(f"{prefix}{LATENT_DOWN}.bias")
        bias = key_bias.new_zeros(query.shape[0])
        if latent.query_rank is not None:
            bias = taken.whole(f"{prefix}{QUERY_DOWN}.bias")
        bias = torch.cat((bias, key_bias[_rotated_index(1, key_dim, config).to(key_bias.device)]))
        if isinstance(joined, torch.Tensor):
            bias = bias.to(joined.dtype)
    return operators.linear(joined, bias)


def lower_query_up(
    prefix: str, config: DecoderConfig, latent: LatentAttention, taken: RankWeights, operators: Operators
) -> Linear:
    """The linear layer ``LatentQueries.query_up``, where queries are made in two steps."""
    query_dim = latent.plain_dim + config.head_dim
    part = taken.part(config.num_attention_heads * query_dim, dim=0)
    own = taken.weight(f"{prefix}{QUERY_UP}.weight", part)
    return operators.linear(_rotated_last(own, query_dim, config), None)


def _by_head(
    prefix: str, config: DecoderConfig, latent: LatentAttention, taken: RankWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[num_heads, plain_dim, latent_dim]`` and ``[num_heads, latent_dim, value_dim]``.

    In the model's data type, whatever the file has them in: both products are of other numbers than those
    that formats were made for.
    """
    sizes = latent.plain_dim, latent.value_dim
    both = taken.share(f"{prefix}{LATENT_UP}.weight", config.num_attention_heads * sum(sizes), dim=0)
    keys, values = both.view(-1, sum(sizes), latent.latent_dim).tensor_split((sizes[0],), dim=1)
    return keys.clone(), values.transpose(1, 2).contiguous()


def _rotated_last(weight: Weight, size: int, config: DecoderConfig) -> Weight:
    """Rows of heads of this size, whose last ones are rotated, in the order that attention rotates in."""
    if rotated_first(config) is None:
        return weight
    return rows_of(weight, _rotated_index(weight.shape[0] // size, size, config))


def _rotated_index(num_heads: int, size: int, config: DecoderConfig) -> torch.Tensor:
    order = rotated_first(config)
    own = torch.arange(size)
    if order is not None:
        own[-len(order) :] = size - len(order) + order
    return (torch.arange(num_heads)[:, None] * size + own).flatten()
