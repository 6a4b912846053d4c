"""Turns what exceptions of libraries say into parts of one sentence."""

from __future__ import annotations

import re

_BY_LAYER = re.compile(r"'(\w+)' is a per-layer attribute")
_MAX_CHARS = 400
"""Characters taken of an exception's text."""


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


def plain_reason(error: BaseException) -> str:
    """What an exception says of a configuration, in its terms where it speaks of the library's objects."""
    by_layer = _BY_LAYER.search(str(error))
    if by_layer is not None:
        return (
            f"per_layer_config gives its layers {by_layer.group(1)} of their own, which transformers' model "
            "of it does not read"
        )
    if isinstance(error, KeyError) and error.args:
        return f"its configuration lacks {error.args[0]!r}"
    if isinstance(error, AttributeError) and type(error.obj).__name__.endswith("Config"):
        return f"its configuration lacks {error.name!r}"
    return first_line(error)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:_MAX_CHARS]}" if lines else type(error).__name__
