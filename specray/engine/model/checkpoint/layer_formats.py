"""Which layers of a quantised checkpoint are stored how: rules by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WHOLE_ROWS = -1
"""Size of a group that is a whole row."""


class UnreadFormatError(Exception):
    """The method's variant is none that is read, or a layer has no one format; the text names it."""


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """How the weight of a quantised layer is stored."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale of ``weight_scale`` or ``weight_scale_inv``; None: whole rows, the
    whole weight, or groups along the columns, as the scales' shape says."""
    bits: int = 8
    """Bits of a packed number."""
    zero_offset: int = 0
    """What is added to the zero points of ``qzeros``."""
    group_size: int | None = None
    """Columns of a group, the last of which may have fewer, or ``WHOLE_ROWS``; None: as the scales' shape
    says."""
    also_needed: frozenset[str] = frozenset()
    """Further tensors that the layer must have, since the configuration speaks of them."""
    has_zero_points: bool = True
    """Whether the layer may have ``weight_zero_point``."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a configuration says of the layers whose names its pattern matches."""

    pattern: re.Pattern[str]
    """Whether the pattern need match no more than a name's beginning."""
    layer: LayerFormat | None
    """None: they are not quantised."""
    priority: int
    """Place among the rules that match one name: the lowest counts."""

    @classmethod
    def of_all(cls, layer: LayerFormat) -> Rule:
        return cls(re.compile(""), layer, _LAST)


_SKIPPED, _BY_NAME, _BY_PATTERN, _LAST = 0, 1, 2, 1 << 30


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A format of quantised weights that :mod:`stored_weights` reads."""

    method: str
    """Name of the method: a key of ``READERS``."""
    rules: tuple[Rule, ...]

    def of_layer(self, name: str) -> LayerFormat:
        """How a layer is stored whose tensors are quantised.

        Raises:
            UnreadFormatError: by the configuration it is not quantised, or in several ways.
        """
        found = [rule for rule in self.rules if rule.pattern.match(name)]
        first = min((rule.priority for rule in found), default=_LAST)
        layers = {rule.layer for rule in found if rule.priority == first}
        if len(layers) > 1:
            raise UnreadFormatError(f"several groups speak of {name!r}, each in its own way")
        if not layers:
            raise UnreadFormatError(f"no target names {name!r}, and its tensors are quantised")
        layer = layers.pop()
        if layer is None:
            raise UnreadFormatError(
                f"{name!r} is among what the configuration leaves as it was, and its tensors are quantised"
            )
        return layer


def target_rule(target: str, layer: LayerFormat | None) -> Rule:
    """A target of compressed-tensors: a layer's name, ``re:`` and a pattern, or a class of modules.

    Names count before patterns, and these before classes; what is ignored is not quantised whatever else
    matches.

    Args:
        layer: None: the target is ignored.
    """
    if target.startswith("re:"):
        pattern, priority = _compiled(target.removeprefix("re:")), _BY_PATTERN
    elif target == "Linear":
        pattern, priority = re.compile(""), _LAST
    else:
        pattern, priority = re.compile(rf"{re.escape(target)}\Z"), _BY_NAME
    return Rule(pattern, layer, priority if layer is not None else _SKIPPED)


def skipped_rules(names: tuple[str, ...]) -> list[Rule]:
    """Layers that transformers leaves as they are: patterns from a name's beginning to the end of one of its
    parts, or ends of names."""
    return [
        Rule(_compiled(rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}\Z"), None, _SKIPPED)
        for name in names
    ]


def dynamic_rules(dynamic: object, layer: Callable[[Mapping[str, Any]], LayerFormat]) -> list[Rule]:
    """GPTQModel's ``dynamic``: patterns of layers with values of their own, the first of which counts.

    Args:
        layer: the format of a layer, by the values that are its own.
    """
    if dynamic is None:
        return []
    if not isinstance(dynamic, Mapping) or not all(isinstance(own, Mapping) for own in dynamic.values()):
        raise UnreadFormatError(f"dynamic {dynamic!r}")
    rules = []
    for priority, (pattern, own) in enumerate(dynamic.items()):
        is_skipped = pattern.startswith("-:")
        compiled = _compiled(pattern.removeprefix("-:" if is_skipped else "+:"))
        rules.append(Rule(compiled, None if is_skipped else layer(own), priority))
    return rules


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UnreadFormatError(f"pattern {pattern!r}: {error}") from None
