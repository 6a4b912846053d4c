"""Builds a layer's experts from a source of weights, in each of the layouts that checkpoints have them in.

Of a group's ranks each has a part of every expert: some of what lies between its two layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.decoder_config import DecoderConfig, ExpertNames, Experts, StackedNames
from specray.engine.model.layers.experts import ClampedGate, ExpertGroup, ExpertLayer, ExpertMlp
from specray.engine.model.layers.routing import Router
from specray.engine.weights.stored_weight import StoredWeight, Weight, alike

if TYPE_CHECKING:
    from specray.engine.model.checkpoint.rank_weights import RankWeights
    from specray.engine.model.linear import Linear
    from specray.engine.model.operators import Operators


def lower_experts(
    prefix: str, experts: Experts, config: DecoderConfig, taken: RankWeights, operators: Operators
) -> ExpertLayer:
    """The experts of the layer whose weights' names begin with ``prefix``."""
    if isinstance(experts.names, StackedNames):
        return _stacked(prefix, experts.names, experts, taken, operators)
    return _apart(f"{prefix}{experts.names.prefix}", experts.names, experts, config, taken, operators)


def _apart(
    prefix: str,
    names: ExpertNames,
    experts: Experts,
    config: DecoderConfig,
    taken: RankWeights,
    operators: Operators,
) -> ExpertLayer:
    size = experts.intermediate_size

    def lowered(number: int) -> ExpertMlp:
        before = f"{prefix}experts.{number}."
        rows = taken.part(size, dim=0)
        gate, up = alike([taken.weight(f"{before}{name}.weight", rows) for name in (names.gate, names.up)])
        down = taken.weight(f"{before}{names.down}.weight", taken.part(size, dim=1))
        gated = operators.gate(gate, up, None, None, config.activation)
        return ExpertMlp(gated, operators.linear(down, None))

    router = operators.router(taken.whole(f"{prefix}gate.weight"), None)
    return _layer(router, [lowered(number) for number in range(experts.num_experts)], experts, operators)


def _stacked(
    prefix: str, names: StackedNames, experts: Experts, taken: RankWeights, operators: Operators
) -> ExpertLayer:
    first, last = taken.run(experts.intermediate_size)
    clamp = experts.clamp
    assert clamp is not None, "stacked experts join gate and up so"

    def part(name: str, number: int) -> torch.Tensor:
        return taken.weights.take(f"{prefix}{name}", WeightPart(0, number, number + 1))[0]

    def stored(name: str, number: int) -> StoredWeight | None:
        return taken.weights.stored(f"{prefix}{name}", WeightPart(0, number, number + 1))

    def joined(number: int) -> Weight:
        own = stored(names.gate_up, number)
        if own is not None:
            return own.select(_in_halves(torch.arange(2 * first, 2 * last)))
        return _in_halves(part(names.gate_up, number)[:, 2 * first : 2 * last].T)

    def last_one(number: int) -> Weight:
        own = stored(names.down, number)
        if own is not None and first % own.unit == last % own.unit == 0:
            return own.columns(first, last)
        return part(names.down, number)[first:last].T.contiguous()

    def lowered(number: int) -> ExpertMlp:
        both, down = joined(number), last_one(number)
        both_bias = _in_halves(part(f"{names.gate_up}_bias", number)[2 * first : 2 * last])
        # The ranks' results are summed.
        down_bias = part(f"{names.down}_bias", number).clone() if taken.is_first else None
        return ExpertMlp(
            ClampedGate(operators.linear(both, both_bias), clamp), operators.linear(down, down_bias)
        )

    router = operators.router(
        taken.whole(f"{prefix}{names.router}.weight"), taken.whole(f"{prefix}{names.router}.bias")
    )
    return _layer(router, [lowered(number) for number in range(experts.num_experts)], experts, operators)


def _layer(router: Linear, lowered: list[ExpertMlp], experts: Experts, operators: Operators) -> ExpertLayer:
    gates = [expert.gate.both if isinstance(expert.gate, ClampedGate) else expert.gate for expert in lowered]
    gate, down = operators.group(gates), operators.group([expert.down for expert in lowered])
    group = None if gate is None or down is None else ExpertGroup(gate, down, experts.clamp)
    return ExpertLayer(Router(router, experts.num_chosen, experts.is_normed), lowered, group)


def _in_halves(both: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up, which come in turn, one after the other; a copy."""
    return both.reshape(-1, 2, *both.shape[1:]).transpose(0, 1).flatten(0, 1).contiguous()
