"""Writes the schemas of tools in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_CHOICES: Final = ("enum", "oneOf")
"""Keywords beside which some templates join the default to a text."""


def with_text_defaults(value: Any) -> Any:
    """A schema, or what contains some, whose defaults beside choices are JSON text where they are no text."""
    if isinstance(value, list | tuple):
        return [with_text_defaults(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    schema = {name: with_text_defaults(entry) for name, entry in value.items()}
    has_choices = any(isinstance(value.get(name), list) for name in _CHOICES)
    if has_choices and "default" in value and not isinstance(value["default"], str):
        schema["default"] = json.dumps(value["default"], ensure_ascii=False)
    return schema
