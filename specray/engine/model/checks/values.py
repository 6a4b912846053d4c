"""Refuses values of config.json of which transformers speaks in terms of its own objects, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specray.errors import ConfigError

_ROPE_FIELDS = ("rope_parameters", "rope_scaling")
_OLD_KINDS = ("su", "mrope")
"""Names of kinds that older files have, which transformers takes for others."""


def check_values(path: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for kinds of rotary embeddings that there are not, and for layers' own settings.

    Args:
        path: as the user wrote it.
        values: what config.json holds.
    """
    # Parts for other modalities have kinds of their own.
    for part in (values, values.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        _check_layers(path, part)
        kinds = (*ROPE_INIT_FUNCTIONS, "default", *_OLD_KINDS)
        for name, kind in _rope_kinds(part):
            if kind not in kinds:
                raise ConfigError(
                    f"model {path!r}: {name} is {kind!r}; allowed: {', '.join(sorted(set(kinds)))}"
                )


def _check_layers(path: str, values: Mapping[str, Any]) -> None:
    layers = values.get("per_layer_config")
    if layers is None:
        return
    is_fit = isinstance(layers, Mapping) and all(
        str(index).isdecimal() and isinstance(each, Mapping) for index, each in layers.items()
    )
    if not is_fit:
        raise ConfigError(
            f"model {path!r}: per_layer_config is {str(layers)[:80]!r}; allowed: an object of objects, by "
            "numbers of layers"
        )


def _rope_kinds(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in _ROPE_FIELDS:
        rope = values.get(field)
        if not isinstance(rope, Mapping):
            continue
        nested = {f"{field}.{key}": each for key, each in rope.items() if isinstance(each, Mapping)}
        for name, each in {field: rope, **nested}.items():
            kind = each.get("rope_type", each.get("type"))
            if kind is not None:
                yield f"{name}.rope_type", kind
