"""Builds a layer's experts from a source of weights, in each of the layouts that checkpoints have them in.

Of a group's ranks each has a part of every expert: some of what lies between its two layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Clamp
from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.decoder_config import DecoderConfig
from specray.engine.model.layers.experts.config import (
    CHOICE_BIAS,
    DOWN,
    GATE_UP,
    LATENT_DOWN,
    LATENT_UP,
    ROUTER,
    SHARED,
    SHARED_GATE,
    Experts,
    Stacked,
    expert_prefix,
)
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp, Latent
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.weights.stored_weight import StoredWeight, Weight, alike

if TYPE_CHECKING:
    from specray.engine.activation import Activation
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.linear import Linear
    from specray.engine.model.operators import Operators


def lower_experts(
    prefix: str, experts: Experts, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> ExpertLayer | WithSharedMlp:
    """The experts of the layer whose weights' names begin with ``prefix``."""
    maker = _MlpMaker(taken, operators, config.activation, config.has_gated_mlps)

    def lowered(number: int) -> ExpertMlp:
        if experts.stacked is not None:
            return maker.make(maker.stacked(prefix, experts.stacked, experts, number), experts.clamp)
        own = f"{prefix}{expert_prefix(number)}"
        return maker.make(
            maker.apart(own, experts.intermediate_size, has_bias=experts.has_bias), experts.clamp
        )

    router = _router(prefix, experts, taken, operators)
    layer = operators.experts(router, [lowered(number) for number in range(experts.num_experts)])
    if experts.latent_size is not None:
        # What ranks' experts give adds up before the layer back as behind it.
        down, up = (
            maker.linear(
                f"{prefix}{name}", has_bias=config.has_mlp_bias and (name == LATENT_DOWN or taken.is_first)
            )
            for name in (LATENT_DOWN, LATENT_UP)
        )
        layer = replace(layer, latent=Latent(down, up))
    shared = experts.shared
    if shared is None:
        return layer
    parts = maker.apart(
        f"{prefix}{SHARED}.",
        shared.intermediate_size,
        has_bias=config.has_mlp_bias,
        is_joined=shared.is_joined,
    )
    gate = operators.router(taken.whole(f"{prefix}{SHARED_GATE}.weight"), None) if shared.has_gate else None
    return WithSharedMlp(layer, maker.make(parts), gate)


def _router(prefix: str, experts: Experts, taken: RankWeights, operators: Operators) -> Router:
    routing = experts.routing

    def whole(name: str) -> torch.Tensor:
        numbers = taken.whole(f"{prefix}{name}")
        return numbers.float() if routing.is_wide else numbers

    bias = whole(f"{ROUTER}.bias") if routing.has_bias else None
    choice_bias = None
    if routing.choice_bias is not None:
        choice_bias = taken.whole(f"{prefix}{CHOICE_BIAS}").float().flatten()
    return Router(operators.router(whole(f"{ROUTER}.weight"), bias), routing, choice_bias)


@dataclass(frozen=True, slots=True)
class _Parts:
    """This rank's weights and biases of an MLP."""

    gate: Weight | None
    """None: an MLP has one linear layer before ``down``, which is ``up``."""
    up: Weight
    down: Weight
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    """The bias on the first rank alone: the ranks' results are summed."""


@dataclass(frozen=True, slots=True)
class _MlpMaker:
    """Makes MLPs of which the ranks' results add up."""

    taken: RankWeights
    operators: Operators
    activation: Activation
    is_gated: bool

    def make(self, parts: _Parts, clamp: Clamp | None = None) -> ExpertMlp:
        down = self.operators.linear(parts.down, _like(parts.down_bias, parts.down))
        if parts.gate is None:
            return ExpertMlp(
                self.operators.squared(self.operators.linear(parts.up, _like(parts.up_bias, parts.up))), down
            )
        gate, up = alike([parts.gate, parts.up])
        gate_bias, up_bias = _like(parts.gate_bias, gate), _like(parts.up_bias, up)
        return ExpertMlp(self.operators.gate(gate, up, gate_bias, up_bias, clamp or self.activation), down)

    def linear(self, name: str, *, has_bias: bool) -> Linear:
        """A linear layer that each rank has as a whole."""
        weight = self.taken.weight(f"{name}.weight")
        bias = self.taken.whole(f"{name}.bias") if has_bias else None
        return self.operators.linear(weight, _like(bias, weight))

    def apart(self, prefix: str, size: int, *, has_bias: bool, is_joined: bool = False) -> _Parts:
        """The parts of an MLP whose layers have weights of their own, or whose gate and up have one."""
        taken = self.taken
        names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        firsts: list[int | None] = [None, None]
        if is_joined:
            names, firsts = [f"{prefix}gate_up_proj"] * 2, [0, size]
        places = [
            (name, taken.part(size, dim=0, first=first)) for name, first in zip(names, firsts, strict=True)
        ][0 if self.is_gated else 1 :]
        weights = [taken.weight(f"{name}.weight", part) for name, part in places]
        gate, up = weights[0] if self.is_gated else None, weights[-1]
        down = taken.weight(f"{prefix}down_proj.weight", taken.part(size, dim=1))
        if not has_bias:
            return _Parts(gate, up, down, None, None, None)
        biases = [taken.weights.take(f"{name}.bias", part).clone() for name, part in places]
        down_bias = taken.whole(f"{prefix}down_proj.bias") if taken.is_first else None
        return _Parts(gate, up, down, biases[0] if self.is_gated else None, biases[-1], down_bias)

    def stacked(self, prefix: str, stacked: Stacked, experts: Experts, number: int) -> _Parts:
        """The parts of one expert of those whose weights are one."""
        taken, size, only = self.taken, experts.intermediate_size, WeightPart(0, number, number + 1)
        first, last = taken.run(size)
        inner = torch.arange(first, last)
        gate, up = (2 * inner, 2 * inner + 1) if stacked.is_in_turn else (inner, size + inner)

        def numbers(name: str) -> torch.Tensor:
            """``[out_features, in_features]``."""
            weight = taken.weights.take(f"{prefix}{name}", only)[0]
            return weight.T if stacked.is_transposed else weight

        def one(name: str) -> Weight:
            own = taken.weights.stored(f"{prefix}{name}", only)
            return numbers(name) if own is None else own

        def bias(name: str) -> torch.Tensor:
            return taken.weights.take(f"{prefix}{name}_bias", only)[0]

        both, down = one(GATE_UP), one(DOWN)
        if isinstance(down, StoredWeight) and (first % down.unit or last % down.unit):
            # A rank's part cuts a block.
            down = numbers(DOWN)
        if isinstance(down, StoredWeight):
            down = down.columns(first, last)
        else:
            down = down[:, first:last].contiguous()
        weights = _rows(both, gate), _rows(both, up), down
        if not experts.has_bias:
            return _Parts(*weights, None, None, None)
        both_bias = bias(GATE_UP)
        down_bias = bias(DOWN).clone() if taken.is_first else None
        return _Parts(*weights, both_bias[gate], both_bias[up], down_bias)


def _rows(weight: Weight, index: torch.Tensor) -> Weight:
    return weight.select(index) if isinstance(weight, StoredWeight) else weight[index.to(weight.device)]


def _like(bias: torch.Tensor | None, weight: Weight) -> torch.Tensor | None:
    """Kernels of stored weights take a bias as the file has it; others take it in the weight's type."""
    return bias if bias is None or isinstance(weight, StoredWeight) else bias.to(weight.dtype)
