"""Builds recurrent layers from a configuration and a source of weights; each rank takes its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from specray.engine.model.layers.convolution import ShortConvolution
from specray.engine.model.layers.delta import DeltaInputs, GatedDelta, Mixer
from specray.engine.model.layers.mixers.mamba import GroupNorm, Mamba
from specray.engine.model.layers.recurrent_config import (
    DECAY_DOWN,
    DECAY_UP,
    DELTA_CONVOLUTIONS,
    GATE_DOWN,
    GATE_UP,
    RATES,
    ConvolutionLayers,
    DeltaLayers,
    DeltaWeights,
    Multipliers,
)
from specray.engine.weights.stored_weight import StoredWeight, Weight, join

if TYPE_CHECKING:
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.checkpoint.source import WeightPart
    from specray.engine.model.layers.latent.projections import HeadProduct
    from specray.engine.model.layers.normed import Rows
    from specray.engine.model.layers.recurrent_config import MambaLayers, RecurrentLayers
    from specray.engine.model.operators import Operators


PlainMixer = GatedDelta | Mamba | ShortConvolution
"""Mixers of torch's operators."""


class Mixing(NamedTuple):
    """A recurrent layer's own part."""

    linear: Rows
    """Input projection of all that the mixer takes."""
    mixer: Mixer
    output: str
    """Name of the output projection in the layer."""
    num_outputs: int
    """Numbers of a row that all ranks' mixers give together."""
    has_output_bias: bool = False
    output_scale: float = 1.0
    """Factor of what the output projection gives."""


def lower_mixer(prefix: str, layers: RecurrentLayers, taken: RankWeights, operators: Operators) -> Mixing:
    """Builds what a layer does that keeps a state; ``prefix`` is the layer's."""
    if isinstance(layers, DeltaLayers):
        return _delta(prefix, layers, taken, operators)
    if isinstance(layers, ConvolutionLayers):
        return _convolution(prefix, layers, taken, operators)
    return _mamba(prefix, layers, taken, operators)


def _mamba(prefix: str, layers: MambaLayers, taken: RankWeights, operators: Operators) -> Mixing:
    num_ranks = 1 if taken.parallel is None else taken.parallel.world_size
    shape, own = layers.state_shape(num_ranks), f"{prefix}{layers.prefix}"
    num_keys, num_values = layers.num_groups * layers.key_dim, layers.num_heads * layers.value_dim
    # Files have [z | x | B | C | dt], of which x, B and C are convolved.
    keys = [
        taken.heads(layers.num_groups, layers.key_dim, first)
        for first in (2 * num_values + num_keys, 2 * num_values)
    ]
    others = [
        taken.part(size, dim=0, first=first)
        for size, first in (
            (num_values, num_values),
            (num_values, 0),
            (layers.num_heads, 2 * (num_values + num_keys)),
        )
    ]
    channels = [
        *(
            taken.heads(layers.num_groups, layers.key_dim, first)
            for first in (num_values + num_keys, num_values)
        ),
        taken.part(num_values, dim=0, first=0),
    ]

    def channel_numbers(name: str) -> torch.Tensor:
        return _joined_parts(f"{own}{name}", channels, taken)

    decay, skips, bias = (
        taken.share(f"{own}{name}", layers.num_heads, dim=0).float() for name in ("A_log", "D", "dt_bias")
    )
    scales = layers.multipliers or Multipliers(1.0, 1.0, 1.0, 1.0, 1.0)
    factors = torch.cat(
        [
            torch.full((size,), scale)
            for size, scale in (
                (layers.num_local_groups(num_ranks) * layers.key_dim, scales.queries),
                (layers.num_local_groups(num_ranks) * layers.key_dim, scales.keys),
                (num_values // num_ranks, scales.values),
            )
        ]
    ).to(decay.device)
    taps = channel_numbers("conv1d.weight")[:, 0].float() * factors[:, None]
    mixer = operators.mixer(
        Mamba(
            shape,
            layers.num_local_groups(num_ranks),
            taps.t().contiguous(),
            channel_numbers("conv1d.bias").float() if layers.has_conv_bias else torch.zeros_like(factors),
            decay.exp(),
            bias.clone(),
            skips.clone(),
            _group_norm(own, layers, taken),
            layers.steps,
            scales.steps,
            scales.gate,
        )
    )
    parts = [*keys, *others]
    inputs = operators.linear(
        join([taken.weight(f"{own}in_proj.weight", part) for part in parts]),
        _joined_parts(f"{own}in_proj.bias", parts, taken) if layers.has_input_bias else None,
    )
    return Mixing(
        inputs, mixer, f"{layers.prefix}out_proj", num_values, layers.has_output_bias, layers.output_scale
    )


def _group_norm(prefix: str, layers: MambaLayers, taken: RankWeights) -> GroupNorm | None:
    if layers.norm_eps is None:
        return None
    parallel, num_ranks = taken.parallel, 1 if taken.parallel is None else taken.parallel.world_size
    weight = taken.share(f"{prefix}norm.weight", layers.num_heads * layers.value_dim, dim=0).float()
    weight = weight.view(layers.num_local_groups(num_ranks), -1).clone()
    num_shared = max(1, num_ranks // layers.num_groups)
    return GroupNorm(
        weight, layers.norm_eps, layers.is_normed_first, parallel if num_shared > 1 else None, num_shared
    )


def _joined_parts(name: str, parts: list[WeightPart | None], taken: RankWeights) -> torch.Tensor:
    return torch.cat([taken.weights.take(name, part) for part in parts])


def _convolution(prefix: str, layers: ConvolutionLayers, taken: RankWeights, operators: Operators) -> Mixing:
    num_ranks = 1 if taken.parallel is None else taken.parallel.world_size
    own, size = f"{prefix}{layers.prefix}", layers.num_channels
    parts = [taken.part(size, dim=0, first=place * size) for place in range(3)]
    taps = taken.share(f"{own}conv.weight", size, dim=0)[:, 0].float()
    bias = taken.share(f"{own}conv.bias", size, dim=0).float().clone() if layers.has_bias else None
    mixer = operators.mixer(ShortConvolution(layers.state_shape(num_ranks), taps.t().contiguous(), bias))
    inputs = operators.linear(
        join([taken.weight(f"{own}in_proj.weight", part) for part in parts]),
        _joined_parts(f"{own}in_proj.bias", parts, taken) if layers.has_bias else None,
    )
    return Mixing(inputs, mixer, f"{layers.prefix}out_proj", size, layers.has_bias)


def _delta(prefix: str, layers: DeltaLayers, taken: RankWeights, operators: Operators) -> Mixing:
    num_ranks = 1 if taken.parallel is None else taken.parallel.world_size
    shape, prefix = layers.state_shape(num_ranks), f"{prefix}{layers.prefix}"
    num_keys, num_values = layers.num_key_heads * layers.key_dim, layers.num_heads * layers.value_dim
    sizes = num_keys, num_keys, num_values
    names = [f"{prefix}in_proj_qkv"] * 3
    firsts: list[int | None] = [0, num_keys, 2 * num_keys]
    conv_names = ["conv1d"]
    own_values, own_heads = taken.part(num_values, dim=0), taken.part(layers.num_heads, dim=0)
    others = {"in_proj_z": own_values, "in_proj_b": own_heads, "in_proj_a": own_heads}
    if layers.has_parts:
        names, firsts = [f"{prefix}{name}_proj" for name in "qkv"], [None] * 3
        conv_names = list(DELTA_CONVOLUTIONS)
        own_decays = taken.part(layers.num_heads * layers.gate_dim, dim=0)
        others = {"g_proj": own_values, "b_proj": own_heads, layers.decay_name: own_decays}
    if layers.is_in_steps:
        others = {"b_proj": own_heads, GATE_DOWN: None, DECAY_DOWN: None}
    parts = [taken.part(size, dim=0, first=first) for size, first in zip(sizes, firsts, strict=True)]
    if layers.weights is DeltaWeights.JOINED:
        joined = _from_joined(prefix, layers, taken)
    else:
        joined = join(
            [
                *(taken.weight(f"{name}.weight", part) for name, part in zip(names, parts, strict=True)),
                *(taken.weight(f"{prefix}{name}.weight", part) for name, part in others.items()),
            ]
        )
    convs = torch.cat([taken.whole(f"{prefix}{name}.weight") for name in conv_names])
    begins = 0, num_keys, 2 * num_keys
    conv = torch.cat(
        [
            convs[begin + first : begin + last]
            for begin, (first, last) in zip(begins, map(taken.run, sizes), strict=True)
        ]
    )
    rates = taken.whole(f"{prefix}{RATES if layers.has_rates else 'A_log'}").float().flatten()
    rates = rates[slice(*taken.run(layers.num_heads))]
    bias = taken.share(f"{prefix}dt_bias", layers.num_heads * layers.gate_dim, dim=0).float()
    mixer = operators.mixer(
        GatedDelta(
            shape,
            conv[:, 0].float().t().contiguous(),
            -rates if layers.has_rates else rates.exp(),
            bias.clone(),
            taken.whole(f"{prefix}{layers.norm_name}.weight").float(),
            layers.norm_eps,
            layers.rate_scale,
            has_sigmoid=layers.is_by_number,
            least_log_decay=layers.least_log_decay,
        )
    )
    inputs: Rows = operators.linear(joined, None)
    if layers.is_in_steps:
        gates = _by_head(f"{prefix}{GATE_UP}", layers, layers.value_dim, taken, operators)
        decays = _by_head(f"{prefix}{DECAY_UP}", layers, layers.key_dim, taken, operators)
        inputs = operators.inputs(DeltaInputs(inputs, gates, decays))
    return Mixing(inputs, mixer, f"{layers.prefix}{layers.output_name}", num_values)


def _by_head(
    name: str, layers: DeltaLayers, size: int, taken: RankWeights, operators: Operators
) -> HeadProduct:
    """A linear layer to so many numbers of each head, in the model's data type."""
    weight = taken.share(f"{name}.weight", layers.num_heads * size, dim=0)
    return operators.head_product(weight.view(-1, size, layers.key_dim).transpose(1, 2).contiguous())


def _from_joined(prefix: str, layers: DeltaLayers, taken: RankWeights) -> Weight:
    """Rows that lie key head by key head, in the order that :class:`GatedDelta` takes."""
    size, shared = layers.key_dim, layers.num_heads // layers.num_key_heads
    lengths = size, size, shared * layers.value_dim, shared * layers.value_dim
    both = [
        taken.weight(f"{prefix}{name}.weight", taken.part(count * layers.num_key_heads, dim=0))
        for name, count in (("in_proj_qkvz", sum(lengths)), ("in_proj_ba", 2 * shared))
    ]
    orders = [
        by_kind(both[0].shape[0], lengths),
        by_kind(both[1].shape[0], (shared, shared)),
    ]
    return join([rows_of(weight, order) for weight, order in zip(both, orders, strict=True)])


def by_kind(num_rows: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """Indices of rows in groups of several kinds: all of the first kind, all of the second, ..."""
    groups = torch.arange(num_rows).view(-1, sum(lengths))
    return torch.cat([kind.reshape(-1) for kind in torch.split(groups, list(lengths), 1)])


def rows_of(weight: Weight, index: torch.Tensor) -> Weight:
    """Some rows of a weight, in this order; ``index`` is int64."""
    return weight.select(index) if isinstance(weight, StoredWeight) else weight[index.to(weight.device)]
