"""What an adapter adds to each linear layer of the decoder, on this rank.

The rows of a layer's weight are chosen, ordered and joined when the decoder is built. An adapter's ``up`` has
the same rows, so it goes through the same functions; of a layer whose input features are dealt to the ranks,
``down`` has the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from specray.engine.model.checkpoint.rank_weights import RankWeights
from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.decoder_config import DecoderConfig, layer_prefix
from specray.engine.model.layers.latent.config import LATENT_DOWN, QUERY_DOWN, QUERY_UP
from specray.engine.model.lowering import changeable_linears

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.operators import Operators

MODULES = {
    "qkv": (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")), QUERY_DOWN, LATENT_DOWN),
    "query_up": (QUERY_UP,),
    "output_gate": ("self_attn.q_proj", "self_attn.g_proj"),
    "output": ("self_attn.o_proj",),
    "gate": tuple(f"mlp.{name}_proj" for name in ("gate", "up", "gate_up")),
    "down": ("mlp.down_proj",),
}
"""Modules of a checkpoint by the field of ``decoder.DecoderLayer`` that computes them, or by the second step
of latent attention's queries in ``qkv``."""


class Place(NamedTuple):
    """A linear layer of the decoder."""

    layer: int
    field: str
    """One of ``MODULES``."""


class Matrices(NamedTuple):
    """What an adapter adds to a weight: ``up @ down``."""

    down: torch.Tensor  # [rank, in_features]
    up: torch.Tensor  # [out_features, rank], with the scale


@dataclass(frozen=True, slots=True)
class Part:
    """What an adapter adds to a linear layer on this rank."""

    down: torch.Tensor  # [rank, in_features]
    ups: tuple[torch.Tensor, ...]  # [out_features, rank]; two of a gated pair, the gate's first

    @property
    def rank(self) -> int:
        return self.down.shape[0]


def places_of(config: DecoderConfig) -> Iterator[tuple[Place, tuple[str, ...]]]:
    """The layers that adapters may change, with the names of their weights in a checkpoint.

    Experts and recurrent layers are none of them, nor what latent attention absorbs, what is multiplied by a
    number of the model, nor MLPs without a gate. Queries with a gate in their rows are in two places.
    """
    shapes = config.weight_shapes()
    gates = {"self_attn.q_proj": config.has_output_gate, "self_attn.g_proj": config.has_head_gates}
    left_out = {
        "output": config.attention_scale != 1.0,
        "gate": config.gate_scale != 1.0 or not config.has_gated_mlps,
        "down": config.down_scale != 1.0 or not config.has_gated_mlps,
    }
    for layer in range(config.num_hidden_layers):
        for field, modules in MODULES.items():
            if left_out.get(field):
                continue
            if field == "output_gate":
                modules = tuple(module for module in modules if gates[module])
            names = tuple(f"{layer_prefix(layer)}{module}.weight" for module in modules)
            if found := tuple(name for name in names if name in shapes):
                yield Place(layer, field), found


def parts_of(
    config: DecoderConfig, parallel: ParallelContext | None, matrices: Mapping[str, Matrices]
) -> dict[Place, Part]:
    """The parts of an adapter on this rank.

    Args:
        matrices: by the names of weights, all of them of :func:`places_of`; float32.
    """
    parts: dict[Place, Part] = {}
    shapes = config.weight_shapes()
    for place, names in places_of(config):
        own = {name: matrices[name] for name in names if name in matrices}
        if not own:
            continue
        source = _Ups(own, shapes)
        taken, operators = RankWeights(source, parallel), cast("Operators", _AsTheyAre())
        found = changeable_linears(place.layer, config, taken, operators)[place.field]()
        ups = found if isinstance(found, tuple) else (found,)
        down = torch.cat([each.down for each in own.values()])
        if source.columns is not None:
            down = down[:, source.columns.start : source.columns.stop]
        parts[place] = Part(down.contiguous(), tuple(up.contiguous() for up in ups))
    return parts


class _Ups:
    """Implements ``source.WeightSource``: in the place of each weight of a layer its ``up``.

    All have the ranks of all side by side, those of others zero.
    """

    def __init__(self, own: Mapping[str, Matrices], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._own, self._shapes = own, shapes
        self._rank = sum(each.down.shape[0] for each in own.values())
        self.columns: WeightPart | None = None
        """Columns of the weight that were taken; None: all."""

    def take(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        taken = torch.zeros(shape if len(shape) == 1 else (shape[0], self._rank))
        first = 0
        for other, each in self._own.items():
            if other == name:
                taken[:, first : first + each.up.shape[1]] = each.up
            first += each.up.shape[1]
        if part is not None and part.dim == 1:
            self.columns = part
            return taken
        return taken if part is None else taken[part.start : part.stop]

    def stored(self, name: str, part: WeightPart | None = None) -> None:
        return None


class _AsTheyAre:
    """In the place of ``operators.Operators``: weights are left as the decoder would compute with them."""

    def linear(self, weight: Any, bias: Any) -> Any:
        return weight

    def gate(self, gate: Any, up: Any, *others: Any) -> Any:
        return gate, up

    def row_gate(self, linear: Any, *others: Any) -> Any:
        return linear
