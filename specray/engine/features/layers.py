"""Which layers of the target a drafter reads: two conventions of numbering, told apart by where ids stand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from specray.engine.features.files import DrafterFiles

_log = logging.getLogger(__name__)

_NESTED = "eagle_config"
_FIELDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_LEAST_BY_DEFAULT = 6
"""Layers that a target needs so that the usual three are three, one after the other."""


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
    field, ids = _find(files.config)
    if ids is None:
        if num_layers < _LEAST_BY_DEFAULT:
            raise files.refuse(
                f"{_FIELDS[0]} is not set, and the target has {num_layers} layers; allowed without: at least "
                f"{_LEAST_BY_DEFAULT}"
            )
        field, ids = "the default", (2, num_layers // 2, num_layers - 3)
    if not all(type(layer) is int and 0 <= layer <= num_layers for layer in ids):
        raise files.refuse(f"{field} is {list(ids)}; allowed: layers of the target, which has {num_layers}")
    if len(ids) != num_read:
        raise files.refuse(f"{field} names {len(ids)} layers; allowed: {num_read}, as fc.weight joins")
    _log.info("drafter %s reads what enters layers %s of the target (%s)", files.path, list(ids), field)
    return tuple(ids)


def _find(config: dict[str, Any]) -> tuple[str, Sequence[Any] | None]:
    """The field that names layers, and what they are in the first convention."""
    for name in _FIELDS:
        if isinstance(ids := config.get(name), list):
            return name, ids
    nested = config.get(_NESTED)
    if isinstance(nested, dict):
        for name in _FIELDS:
            if isinstance(ids := nested.get(name), list):
                return f"{_NESTED}.{name}", [each + 1 if type(each) is int else each for each in ids]
    return _FIELDS[0], None
