"""Composes JSON schemas of the kinds that clients send, by a seed; some cannot be enforced.

The kinds are those of JSONSchemaBench: nested objects, arrays, enums, patterns, formats, references, unions,
and numbers with bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

Schema = dict[str, Any]
REFUSED_EVERY: Final = 10
"""One schema in so many has a keyword that no grammar can enforce."""
_MAX_DEPTH: Final = 3
_TOPICS: Final = {
    "a person": ("name", "age", "email", "address", "phone", "nickname", "born", "languages"),
    "a product in a shop": ("title", "price", "currency", "sku", "tags", "stock", "rating", "size"),
    "an order of a customer": ("id", "items", "total", "status", "placed", "coupon", "shipping", "paid"),
    "the weather of a city": ("city", "temperature", "humidity", "wind", "condition", "alerts", "at", "days"),
    "the settings of a server": ("host", "port", "debug", "level", "timeout", "users", "version", "limits"),
    "an event in a log": ("time", "level", "message", "source", "code", "fields", "user", "trace"),
    "a movie": ("title", "year", "genres", "director", "length", "score", "cast", "released"),
    "a recipe": ("name", "servings", "steps", "minutes", "difficulty", "vegan", "units", "notes"),
    "a flight": ("number", "origin", "departs", "arrives", "seats", "carrier", "stops", "gate"),
    "a call of a function": ("function", "arguments", "city", "unit", "count", "dry_run", "query", "page"),
}
"""Names of fields by what they describe."""
_WORDS: Final = ("red", "green", "blue", "low", "medium", "high", "open", "closed", "EUR", "USD", "north")
_PATTERNS: Final = (
    "^[A-Z]{2}-[0-9]{4}$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,3}$",
    "^[A-Z][a-z]{1,12}$",
    "^\\+[1-9][0-9]{7,14}$",
    "^(draft|final)-[a-z]{1,8}$",
    "^[a-z]+(_[a-z]+)*$",
)
_FORMATS: Final = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname")
_REFUSED: Final[dict[str, Schema]] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    '"not"': {"type": "string", "not": {"const": "x"}},
    '"if"': {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    "idn-email": {"type": "string", "format": "idn-email"},
}
"""Schemas by the word that a refusal has to name."""


@dataclass(frozen=True, slots=True)
class SchemaCase:
    name: str
    topic: str
    schema: Schema
    kinds: frozenset[str]
    is_strict: bool
    """OpenAI's ``strict``: the whitespace is fixed, so that more tokens are forced."""
    refused_by: str | None = None
    """Word that the refusal has to name; None: the schema can be enforced."""

    @property
    def prompt(self) -> str:
        names = ", ".join(self.schema["properties"])
        return f"Write a JSON object that describes {self.topic}. Its fields are: {names}."


def compose(num_cases: int, seed: int) -> list[SchemaCase]:
    """Returns the cases; the first ones are the same for every number."""
    return [_case(index, random.Random(f"{seed}-{index}")) for index in range(num_cases)]


def _case(index: int, source: random.Random) -> SchemaCase:
    composer = _Composer(source)
    topic, names = source.choice(list(_TOPICS.items()))
    schema = composer.object_of(source.sample(names, source.randint(1, 5)), _MAX_DEPTH)
    refused_by = None
    if index % REFUSED_EVERY == REFUSED_EVERY - 1:
        refused_by = source.choice(list(_REFUSED))
        name = source.choice(names)
        schema["properties"][name] = _REFUSED[refused_by]
        schema["required"] = [*{*schema["required"], name}]
    if composer.definitions:
        schema["$defs"] = composer.definitions
    return SchemaCase(f"schema-{index}", topic, schema, frozenset(composer.kinds), index % 2 == 1, refused_by)


@dataclass(slots=True)
class _Composer:
    source: random.Random
    definitions: dict[str, Schema] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)

    def object_of(self, names: list[str], depth: int) -> Schema:
        properties = {name: self._value(depth - 1) for name in names}
        least = self.source.randint(1, len(names))
        schema: Schema = {
            "type": "object",
            "properties": properties,
            "required": names[:least],
            "additionalProperties": False,
        }
        if self.source.random() < 0.1:
            self.kinds.add("additionalProperties")
            schema["additionalProperties"] = {"type": self.source.choice(("boolean", "integer"))}
        return schema

    def _value(self, depth: int) -> Schema:
        flat: tuple[Callable[[], Schema], ...] = (
            *(self._string, self._string, self._enum, self._pattern, self._format),
            *(self._integer, self._integer, self._number, self._boolean, self._constant),
        )
        if depth <= 0:
            return self.source.choice(flat)()
        deep = (self._object, self._object, self._array, self._array, self._union, self._reference)
        if self.source.random() < 0.45:
            return self.source.choice(deep)(depth)
        return self.source.choice(flat)()

    def _object(self, depth: int) -> Schema:
        self.kinds.add("nested object")
        names = self.source.sample(self.source.choice(list(_TOPICS.values())), self.source.randint(1, 3))
        return self.object_of(names, depth)

    def _array(self, depth: int) -> Schema:
        self.kinds.add("array")
        schema: Schema = {"type": "array", "items": self._value(depth - 1)}
        if self.source.random() < 0.8:
            schema["minItems"] = self.source.randint(0, 2)
            schema["maxItems"] = schema["minItems"] + self.source.randint(1, 3)
        return schema

    def _union(self, depth: int) -> Schema:
        self.kinds.add("anyOf")
        return {"anyOf": [self._value(depth - 1) for _ in range(self.source.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        self.kinds.add("$ref")
        if self.source.random() < 0.3:
            self.kinds.add("recursion")
            last = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
            self.definitions["node"] = {
                "type": "object",
                "properties": {"label": {"enum": list(_WORDS[:3])}, "next": last},
                "required": ["label", "next"],
                "additionalProperties": False,
            }
            return {"$ref": "#/$defs/node"}
        name = f"part{len(self.definitions)}"
        # The name is taken before the definition is composed, which may have parts of its own.
        self.definitions[name] = {}
        self.definitions[name] = self._value(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _string(self) -> Schema:
        if self.source.random() < 0.3:
            return {"type": "string"}
        self.kinds.add("string length")
        least = self.source.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + self.source.randint(4, 30)}

    def _enum(self) -> Schema:
        self.kinds.add("enum")
        values: list[Any] = self.source.sample(_WORDS, self.source.randint(2, 5))
        return {"enum": [*values, *self.source.choice(([], [None], [1, 2]))]}

    def _pattern(self) -> Schema:
        self.kinds.add("pattern")
        schema: Schema = {"type": "string", "pattern": self.source.choice(_PATTERNS)}
        if self.source.random() < 0.5:
            schema["maxLength"] = 20
        return schema

    def _format(self) -> Schema:
        self.kinds.add("format")
        return {"type": "string", "format": self.source.choice(_FORMATS)}

    def _integer(self) -> Schema:
        self.kinds.add("bounds")
        least = self.source.randint(-5, 100)
        schema: Schema = {"type": "integer", "minimum": least, "maximum": least + self.source.randint(7, 900)}
        if self.source.random() < 0.2:
            self.kinds.add("multipleOf")
            schema["multipleOf"] = self.source.choice((2, 5, 7))
        return schema

    def _number(self) -> Schema:
        self.kinds.add("bounds")
        least = self.source.choice((0, 0.5, -1.5, 10))
        above = self.source.choice(("maximum", "exclusiveMaximum"))
        return {"type": "number", "minimum": least, above: least + self.source.choice((1, 2.5, 100))}

    def _boolean(self) -> Schema:
        return {"type": self.source.choice(("boolean", ["boolean", "null"]))}

    def _constant(self) -> Schema:
        self.kinds.add("const")
        return {"const": self.source.choice(("v1", 7, {"kind": "x", "n": [1, 2]}))}
