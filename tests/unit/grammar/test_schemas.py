"""JSON schemas: what is written under their masks validates; what cannot be enforced is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from specray.errors import InvalidRequestError
from specray.grammar.forms import json_grammar
from specray.types import Grammar, GrammarKind
from tests.unit.grammar.test_matcher import ENDS, backend, compiler, legal, piece

pytestmark = pytest.mark.slow

SCHEMAS: dict[str, Any] = {
    "integer bounds": {"type": "integer", "minimum": -3, "exclusiveMaximum": 40},
    "number bounds": {"type": "number", "minimum": 0.5, "maximum": 1.5},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7},
    "enum": {"enum": ["red", 3, None, {"a": [1]}]},
    "const": {"const": {"kind": "x", "n": [1, 2]}},
    "pattern and maxLength": {"type": "string", "pattern": "^[a-c]+[0-9]$", "maxLength": 6},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "time": {"type": "string", "format": "time"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "anyOf": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}]},
    "oneOf of disjoint types": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "unevaluated": "an annotation",
    },
    "nested": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1, "maximum": 9},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
            "at": {
                "type": "object",
                "properties": {"lat": {"type": "integer"}},
                "required": ["lat"],
                "additionalProperties": False,
            },
        },
        "required": ["id", "at"],
        "additionalProperties": False,
    },
    "reference": {
        "$defs": {"flag": {"type": "boolean"}},
        "type": "array",
        "items": {"$ref": "#/$defs/flag"},
        "minItems": 1,
        "maxItems": 2,
    },
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "type list": {"type": ["null", "boolean"]},
    "additional properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "number of properties": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 2,
    },
}
REFUSED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"contains": {"type": "integer"}},
    "minContains": {"type": "array", "minContains": 2},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {}}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "idn-email": {"type": "string", "format": "idn-email"},
    "strin": {"type": "strin"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "http://x/y": {"$ref": "http://x/y"},
    "/nope": {"$ref": "#/nope"},
    "false": False,
}


def random_text(grammar: Grammar, seed: int, max_tokens: int = 120) -> str | None:
    """What a careless model would write under the masks; None: it has not come to an end."""
    chance, matcher, output = random.Random(seed), compiler().matcher(grammar), list[int]()
    for _ in range(max_tokens):
        choices = legal(matcher.masks(output)[0])
        if choices & ENDS and (choices <= ENDS or chance.random() < 0.5):
            return str(backend().decode(output))
        closing = [token for token in choices - ENDS if set(piece(token)) & set('"}]')]
        pool = closing if closing and chance.random() < 0.3 else sorted(choices - ENDS)
        output.append(chance.choice(sorted(pool)))
    return None


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("is_compact", [False, True])
def test_everything_written_under_the_masks_validates(name: str, is_compact: bool) -> None:
    grammar = json_grammar(SCHEMAS[name], is_compact=is_compact)
    texts = [text for seed in range(6) if (text := random_text(grammar, seed)) is not None]
    assert texts
    checker = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for text in texts:
        checker.validate(json.loads(text))


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_name(word: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler().check(json_grammar(REFUSED[word]), field="response_format")
    assert caught.value.field == "response_format"
    assert word in str(caught.value)


def nested(depth: int, step: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = step(schema)
    return schema


HOSTILE = {
    "any of": json_grammar(nested(300, lambda inner: {"anyOf": [inner, {"type": "string"}]})),
    "arrays": json_grammar(nested(400, lambda inner: {"type": "array", "items": inner})),
    "patterns": json_grammar(
        {"allOf": [{"type": "string", "pattern": f"^.*{chr(97 + i)}.{{{i},}}$"} for i in range(16)]}
    ),
    "properties": json_grammar({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}),
    "length": Grammar(GrammarKind.REGEX, "a" * 600_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced"):
        compiler().check(HOSTILE[name], field="guided_json")


def test_a_refusal_is_kept_like_a_grammar() -> None:
    before = compiler().stats.num_compiled
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="uniqueItems"):
            compiler().check(json_grammar({"uniqueItems": True, "title": "kept"}), field="guided_json")
    assert compiler().stats.num_compiled == before + 1
