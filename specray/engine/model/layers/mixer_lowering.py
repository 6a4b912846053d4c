"""Builds recurrent layers from a configuration and a source of weights; each rank takes its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from specray.engine.model.layers.delta import GatedDelta, Mixer
from specray.engine.model.layers.recurrent_config import RATES
from specray.engine.weights.stored_weight import StoredWeight, Weight, join

if TYPE_CHECKING:
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.decoder_config import DecoderConfig
    from specray.engine.model.layers.recurrent_config import DeltaLayers
    from specray.engine.model.linear import Linear
    from specray.engine.model.operators import Operators


class Mixing(NamedTuple):
    """A recurrent layer's own part."""

    linear: Linear
    """Input projection of all that the mixer takes."""
    mixer: Mixer
    output: str
    """Name of the output projection in the layer."""
    num_outputs: int
    """Numbers of a row that all ranks' mixers give together."""


def lower_mixer(
    prefix: str, config: DecoderConfig, layers: DeltaLayers, taken: RankWeights, operators: Operators
) -> Mixing:
    """Builds what a layer has in the place of attention; ``prefix`` is the layer's."""
    num_ranks = 1 if taken.parallel is None else taken.parallel.world_size
    shape, prefix = layers.state_shape(num_ranks), f"{prefix}{layers.prefix}"
    num_keys, num_values = layers.num_key_heads * layers.key_dim, layers.num_heads * layers.value_dim
    if layers.is_joined:
        joined = _from_joined(prefix, layers, taken)
    else:
        joined = join(
            [
                *_three(f"{prefix}in_proj_qkv.weight", num_keys, num_values, taken),
                taken.weight(f"{prefix}in_proj_z.weight", taken.part(num_values, dim=0)),
                taken.weight(f"{prefix}in_proj_b.weight", taken.part(layers.num_heads, dim=0)),
                taken.weight(f"{prefix}in_proj_a.weight", taken.part(layers.num_heads, dim=0)),
            ]
        )
    conv = torch.cat(
        [
            taken.share(f"{prefix}conv1d.weight", size, dim=0, first=first)
            for size, first in ((num_keys, 0), (num_keys, num_keys), (num_values, 2 * num_keys))
        ]
    )
    rates, bias = (
        taken.share(f"{prefix}{name}", layers.num_heads, dim=0).float()
        for name in (RATES if layers.has_rates else "A_log", "dt_bias")
    )
    mixer = operators.gated_delta(
        GatedDelta(
            shape,
            conv[:, 0].float().t().contiguous(),
            -rates if layers.has_rates else rates.exp(),
            bias.clone(),
            taken.whole(f"{prefix}norm.weight").float(),
            config.rms_norm_eps,
        )
    )
    return Mixing(operators.linear(joined, None), mixer, f"{layers.prefix}out_proj", num_values)


def _three(name: str, num_keys: int, num_values: int, taken: RankWeights) -> list[Weight]:
    """This rank's rows of queries, keys and values."""
    sizes = ((num_keys, 0), (num_keys, num_keys), (num_values, 2 * num_keys))
    return [taken.weight(name, taken.part(size, dim=0, first=first)) for size, first in sizes]


def _from_joined(prefix: str, layers: DeltaLayers, taken: RankWeights) -> Weight:
    """Rows that lie key head by key head, in the order that :class:`GatedDelta` takes."""
    size, shared = layers.key_dim, layers.num_heads // layers.num_key_heads
    lengths = size, size, shared * layers.value_dim, shared * layers.value_dim
    both = [
        taken.weight(f"{prefix}{name}.weight", taken.part(count * layers.num_key_heads, dim=0))
        for name, count in (("in_proj_qkvz", sum(lengths)), ("in_proj_ba", 2 * shared))
    ]
    orders = [
        _by_kind(both[0].shape[0], lengths),
        _by_kind(both[1].shape[0], (shared, shared)),
    ]
    return join([rows_of(weight, order) for weight, order in zip(both, orders, strict=True)])


def _by_kind(num_rows: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """Indices of rows in groups of several kinds: all of the first kind, all of the second, ..."""
    groups = torch.arange(num_rows).view(-1, sum(lengths))
    return torch.cat([kind.reshape(-1) for kind in torch.split(groups, list(lengths), 1)])


def rows_of(weight: Weight, index: torch.Tensor) -> Weight:
    """Some rows of a weight, in this order; ``index`` is int64."""
    return weight.select(index) if isinstance(weight, StoredWeight) else weight[index.to(weight.device)]
