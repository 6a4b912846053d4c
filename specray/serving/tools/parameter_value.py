"""The value of an argument that is written as text: what the tool's schema makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specray.grammar import resolve
from specray.serving.tools.json_text import json_of, loads
from specray.serving.tools.python_value import read_value

_MAX_REFERENCES: Final = 32
"""References of schemas to each other that are followed."""
_CHOICE: Final = "choice"
_KINDS: Final = frozenset(("string", "null", "boolean", "integer", "number", "array", "object"))
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")
_LITERALS: Final[dict[str, object]] = {"true": True, "false": False, "null": None, "none": None}


class ParameterSchema:
    """The schema of one parameter, with everything that it refers to.

    Args:
        parameters: JSON schema of the tool's parameters.
        key: name of the parameter.
    """

    def __init__(self, parameters: Mapping[str, Any], key: str) -> None:
        self._root = dict(parameters)
        self._schema = self._resolved(next(self._properties(self._root, key, set()), True))
        self._kinds = self._kinds_of(self._schema, {})

    @property
    def is_text(self) -> bool:
        """Any text is a value as it is written."""
        return self._kinds == {"string"}

    @property
    def is_nullable_text(self) -> bool:
        return self._kinds == {"string", "null"}

    def has_key(self, key: str) -> bool:
        return any(True for _ in self._properties(self._root, key, set()))

    def json(self, text: str) -> str:
        """JSON of what a text stands for. Raises ValueError, RecursionError: it cannot be written."""
        literal = _reading(text)
        value = self._value(text, literal)
        # Digits of a number that is read stay as they are.
        return text.strip() if value is literal and _NUMBER.fullmatch(text.strip()) else json_of(value)

    def _value(self, text: str, literal: object) -> object:
        if not isinstance(literal, str) and self._takes(literal):
            return literal
        if literal is not _NONE and self._kinds == _KINDS:
            return literal
        if self._takes(text):
            return text
        if isinstance(literal, str):
            inner = _reading(literal)
            return next((value for value in (literal, inner) if self._takes(value)), text)
        if literal is _NONE:
            python = _python(text)
            return python if self._takes(python) else text
        is_typed = isinstance(self._schema, Mapping) and "string" not in _types(self._schema)
        return literal if is_typed else text

    def _takes(self, value: object) -> bool:
        return value is not _NONE and self._accepts(self._schema, value, {})

    def _properties(self, schema: object, key: str, seen: set[int]) -> Iterator[object]:
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            yield properties[key]
        for word in ("allOf", "anyOf", "oneOf"):
            for part in _entries(schema, word):
                yield from self._properties(part, key, seen)
        if isinstance(schema.get("additionalProperties"), Mapping):
            yield schema["additionalProperties"]

    def _resolved(self, schema: object) -> object:
        """The schema to which a ``$ref`` leads; one whose ``$ref`` leads nowhere is judged without it."""
        for _ in range(_MAX_REFERENCES):
            found = (
                resolve(self._root, schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else None
            )
            if found is None:
                return schema
            schema = found[0]
        return True

    def _kinds_of(self, schema: object, seen: dict[int, frozenset[str]]) -> frozenset[str]:
        """Kinds of values that a schema may accept; ``choice`` where it names values."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):
            return _KINDS
        if id(schema) in seen:
            return seen[id(schema)]
        seen[id(schema)] = _KINDS  # What a schema says that refers to itself.
        found = [_types(schema)]
        for word in ("anyOf", "oneOf"):
            if entries := _entries(schema, word):
                found.append(frozenset().union(*(self._kinds_of(entry, seen) for entry in entries)))
        found.extend(self._kinds_of(entry, seen) for entry in _entries(schema, "allOf"))
        has_choice = "enum" in schema or "const" in schema or any(_CHOICE in kinds for kinds in found)
        seen[id(schema)] = frozenset((_CHOICE,)) if has_choice else _KINDS.intersection(*found)
        return seen[id(schema)]

    def _accepts(self, schema: object, value: object, seen: dict[int, bool]) -> bool:
        """Whether a value is of a schema's types and named values; what is within it is not looked at."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):
            return schema is not False
        if id(schema) not in seen:
            seen[id(schema)] = False  # What a schema says that refers to itself.
            enum, types = schema.get("enum"), _types(schema)
            seen[id(schema)] = (
                (not isinstance(enum, list) or any(_equal(value, entry) for entry in enum))
                and ("const" not in schema or _equal(value, schema["const"]))
                and bool(_kind_of(value) & types)
                and all(
                    judge(self._accepts(entry, value, seen) for entry in _entries(schema, word))
                    for word, judge in (("anyOf", any), ("oneOf", any), ("allOf", all))
                    if _entries(schema, word)
                )
            )
        return seen[id(schema)]


_NONE: Final = object()


def _reading(text: str) -> object:
    """What a text is as a literal; ``_NONE``: it is none."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return _LITERALS.get(text.strip().lower(), _NONE)


def _python(text: str) -> object:
    """What a text is as a literal of Python; ``_NONE``: it is none, or of no kind that JSON has."""
    try:
        return json.loads(json_of(read_value(text)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NONE


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types
    known = frozenset(name for name in names if name in _KINDS) if isinstance(names, list) else frozenset()
    if "number" in known:
        known |= {"integer"}
    return known or _KINDS


def _kind_of(value: object) -> frozenset[str]:
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset(("integer", "number"))
    names: tuple[tuple[type, str], ...] = ((str, "string"), (float, "number"), (list, "array"))
    return frozenset((next((name for kind, name in names if isinstance(value, kind)), "object"),))


def _equal(value: object, other: object) -> bool:
    """Equality as JSON has it: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _entries(schema: Mapping[str, Any], word: str) -> list[object]:
    entries = schema.get(word)
    return entries if isinstance(entries, list) else []
