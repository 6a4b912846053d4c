"""What cannot be enforced: named by its place where a schema is strict, left out alone where it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar.forms import WHITESPACE, grammar_of, json_grammar
from specray.grammar.schemas import refusal
from specray.types import Grammar, GrammarKind
from tests.unit.grammar.test_matcher import compiler

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
OPEN = [{"type": "object", "properties": {key: {"type": "string"}}} for key in "xy"]
PAIR = {"type": "object", "properties": {"x": {}, "y": {}}}
CASES: dict[str, tuple[Any, Any, str]] = {
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "a"}},
        {"type": "object"},
        'properties.a: "propertyNames" is not supported',
    ),
    "look-ahead": (
        {"type": "string", "format": "email", "pattern": EMAIL},
        {"type": "string", "format": "email"},
        "properties.a.pattern: look-around, including look-ahead and look-behind, is not supported",
    ),
    "word boundary": (
        {"type": "string", "pattern": r"\bfoo\b", "maxLength": 9},
        {"type": "string", "maxLength": 9},
        r"properties.a.pattern: look-around and word boundaries are not supported: /\bfoo\b/",
    ),
    "no expression": (
        {"type": "string", "pattern": "("},
        {"type": "string"},
        "properties.a.pattern: unclosed group",
    ),
    "uniqueItems": (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "string"}},
        'properties.a: "uniqueItems" is not supported',
    ),
    "format": (
        {"type": "string", "format": "color"},
        {"type": "string"},
        "properties.a.format: Unknown format: color",
    ),
    "oneOf": ({"oneOf": OPEN}, {"oneOf": OPEN}, "properties.a: oneOf constraints are not supported"),
    "dependentRequired": (
        {**PAIR, "dependentRequired": {"x": ["y"]}},
        PAIR,
        'properties.a: "dependentRequired" is not supported',
    ),
    "minProperties": (
        {**PAIR, "minProperties": 1},
        PAIR,
        "properties.a.minProperties: min/maxProperties only supported",
    ),
    "several": (
        {"if": {}, "then": {}, "type": "null"},
        {"type": "null"},
        'properties.a: "if" is not supported',
    ),
    "type": ({"type": "strin", "maxLength": 3}, {"maxLength": 3}, "properties.a.type: Invalid type: strin"),
    "another file": ({"$ref": "http://x/y"}, {}, "properties.a.$ref: 'http://x/y' is not found"),
    "no such part": ({"$ref": "#/$defs/z"}, {}, "properties.a.$ref: '#/$defs/z' is not found"),
    "deep": (
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"not": {}, "type": "string"}}]},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}}]},
        'properties.a.anyOf[1].items: "not" is not supported',
    ),
}
IDLE: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": False},
    "propertyNames": {"type": "object", "propertyNames": {"type": "string"}},
    "not": {"type": "string", "not": False},
    "dependentRequired": {"type": "object", "dependentRequired": {}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": True},
}


def around(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"fine": {"type": "integer", "maximum": 9}, "a": schema}}


def asked(schema: Any, strict: bool | None) -> Any:
    value = {"name": "n", "schema": schema, "strict": strict}
    found = grammar_of({"response_format": {"type": "json_schema", "json_schema": value}})
    assert found is not None
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_strict_schema_is_refused_by_keyword_and_place(name: str) -> None:
    schema, _, reason = CASES[name]
    for grammar, field in (asked(around(schema), True), (json_grammar(around(schema)), "guided_json")):
        with pytest.raises(InvalidRequestError) as caught:
            compiler().check(grammar, field=field)
        assert str(caught.value).startswith(f"{field} cannot be enforced: {reason}")
        assert caught.value.field == field


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strict", [False, None])
def test_any_other_loses_what_cannot_be_enforced_and_nothing_else(name: str, strict: bool | None) -> None:
    schema, looser, _ = CASES[name]
    grammar, field = asked(around(schema), strict)
    options = {"whitespace_pattern": WHITESPACE, "lenient": True}
    assert json.loads(grammar.source) == {**around(looser), "x-guidance": options}
    compiler().check(grammar, field=field)


def test_definitions_are_loosened_too() -> None:
    schema = {
        "$defs": {"a": {"type": "string", "pattern": "(?=x)", "minLength": 1}},
        "type": "array",
        "items": {"$ref": "#/$defs/a"},
    }
    source = json.loads(asked(schema, None)[0].source)
    assert source["$defs"] == {"a": {"type": "string", "minLength": 1}}
    assert refusal(schema) == (
        "$defs.a.pattern: look-around, including look-ahead and look-behind, is not supported"
    )


def test_a_long_path_is_shown_from_its_end() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(60):
        schema = {"type": "array", "items": schema}
    reason = refusal(schema)
    assert (
        reason is not None and reason.startswith("...") and reason.endswith('.items: "not" is not supported')
    )
    assert len(reason) < 200


def test_schemas_that_cannot_be_joined_lose_their_property_alone() -> None:
    parts = [{"type": "object", "patternProperties": {key: {}}} for key in ("^a", "b$")]
    source = json.loads(asked(around({"allOf": parts}), None)[0].source)
    assert source["properties"] == {"fine": {"type": "integer", "maximum": 9}, "a": {}}


@pytest.mark.parametrize("name", IDLE)
def test_what_asks_for_nothing_is_no_reason(name: str) -> None:
    idle = {key: value for key, value in IDLE[name].items() if key != name}
    assert json.loads(json_grammar(IDLE[name]).source) == json.loads(json_grammar(idle).source)
    compiler().check(asked(around(IDLE[name]), True)[0], field="f")


def test_a_property_by_the_name_of_a_keyword_stays() -> None:
    schema = {"type": "object", "properties": {"not": False, "uniqueItems": False, "enum": {}}}
    assert json.loads(json_grammar(schema).source)["properties"] == schema["properties"]


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": 5, "maximum": 1}, {"enum": []}, False])
def test_a_schema_without_a_value_is_refused_whatever_it_says_of_strict(schema: Any) -> None:
    properties = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    for strict in (True, None):
        with pytest.raises(InvalidRequestError, match="required property 'a' is unsatisfiable"):
            compiler().check(asked(properties, strict)[0], field="f")


@pytest.mark.parametrize(
    "source", ['start: %json {"not": {}}', 'start: "a" | %json {"type": "string", "pattern": "("}']
)
def test_no_message_has_the_inner_grammar(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler().check(Grammar(GrammarKind.LARK, source), field="f")
    assert "|" not in str(caught.value) and "start" not in str(caught.value) and "\n" not in str(caught.value)
