"""Which layers of the target a drafter reads: two conventions of numbering, told apart by where ids stand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from specray.engine.features.files import DrafterFiles

_log = logging.getLogger(__name__)

_NESTED = "eagle_config"
_BLOCK = "dflash_config"
_LEFT_FIELDS = ("target_layer_ids", "dspark_target_layer_ids")
"""Fields whose ids are of what leaves layers, in block drafters."""
_FIELDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_LEAST_BY_DEFAULT = 6
"""Layers that a target needs so that the usual three are three, one after the other."""


class _Named(NamedTuple):
    """The layers that a configuration names, as it names them."""

    field: str
    ids: Sequence[Any]
    is_left: bool = False
    """Ids count layer outputs (input id - 1); -1 is the embedding."""


def read_layers(files: DrafterFiles, num_layers: int, num_read: int) -> tuple[int, ...]:
    """The layers whose residuals are read, as ``step.ForwardOutput`` numbers them, in the drafter's order.

    At the top level of config.json, id k is what enters layer k. In ``eagle_config`` it is what leaves layer
    k, which enters layer k + 1. Without ids they are 2, half of the layers, and the last but three.

    Args:
        num_layers: of the target.
        num_read: residuals that the drafter's ``fc`` joins.

    Raises:
        ConfigError: ids are of no such layers, or not as many.
    """
    found = _find(files.config)
    if found is None:
        if num_layers < _LEAST_BY_DEFAULT:
            raise files.refuse(
                f"{_FIELDS[0]} is not set, and the target has {num_layers} layers; allowed without: at least "
                f"{_LEAST_BY_DEFAULT}"
            )
        found = _Named("the default", (2, num_layers // 2, num_layers - 3))
    return _checked(files, found, num_layers, num_read)


def read_block_layers(files: DrafterFiles, num_layers: int, num_read: int) -> tuple[int, ...]:
    """Layers that a block drafter reads: ids are of what leaves layers, speculators' of what enters.

    Without ids they are spread evenly from 1 to the last but two.
    """
    found = _find_block(files.config)
    if found is None:
        first, last = 1, num_layers - 3
        steps = max(1, num_read - 1)
        spread = [round(first + index * (last - first) / steps) for index in range(num_read)]
        left = [num_layers // 2] if num_read == 1 else spread
        if last - first < num_read - 1:
            raise files.refuse(
                f"target_layer_ids is not set, and the target has {num_layers} layers; allowed without: at "
                f"least {num_read + 3}"
            )
        found = _Named("the default", left, is_left=True)
    return _checked(files, found, num_layers, num_read)


def _checked(files: DrafterFiles, named: _Named, num_layers: int, num_read: int) -> tuple[int, ...]:
    field, ids, shift = named.field, list(named.ids), int(named.is_left)
    if not all(type(layer) is int and 0 <= layer + shift <= num_layers for layer in ids):
        raise files.refuse(
            f"{field} is {ids}; allowed: numbers {-shift}..{num_layers - shift}, as the target has "
            f"{num_layers} layers"
        )
    if len(ids) != num_read:
        raise files.refuse(f"{field} names {len(ids)} layers; allowed: {num_read}, as fc.weight joins")
    entered = tuple(layer + shift for layer in ids)
    _log.info("drafter %s reads what enters layers %s of the target (%s)", files.path, list(entered), field)
    return entered


def _find_block(config: dict[str, Any]) -> _Named | None:
    nested = config.get(_BLOCK)
    sections = {f"{_BLOCK}.": nested if isinstance(nested, dict) else {}, "": config}
    for prefix, section in sections.items():
        for name in _LEFT_FIELDS:
            if ids := _listed(section, name):
                return _Named(f"{prefix}{name}", ids, is_left=True)
    return _find_entered(config)


def _find(config: dict[str, Any]) -> _Named | None:
    found, nested = _find_entered(config), config.get(_NESTED)
    if found is None and isinstance(nested, dict):
        for name in _FIELDS:
            if ids := _listed(nested, name):
                return _Named(f"{_NESTED}.{name}", ids, is_left=True)
    return found


def _find_entered(config: dict[str, Any]) -> _Named | None:
    for name in _FIELDS:
        if ids := _listed(config, name):
            return _Named(name, ids)
    return None


def _listed(section: dict[str, Any], name: str) -> list[Any]:
    """A list of ids. An empty one, as templates have it, names none, like one that is not there."""
    ids = section.get(name)
    return ids if isinstance(ids, list) else []
