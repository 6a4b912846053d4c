"""What clients send for structured output: each form is one grammar, and each wrong one names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar.forms import WHITESPACE, asking_field, grammar_of
from specray.types import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FLEXIBLE = {**SCHEMA, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def schema_of(fields: dict[str, Any]) -> Any:
    found = grammar_of(fields)
    assert found is not None and found[0].kind is GrammarKind.JSON_SCHEMA
    return json.loads(found[0].source)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
    ],
)
def test_every_form_of_a_schema_is_the_same_grammar(fields: dict[str, Any]) -> None:
    assert schema_of(fields) == FLEXIBLE


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_free_text_is_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(fields) is None


def test_json_object_is_any_object() -> None:
    expected = {"type": "object", "x-guidance": {"whitespace_pattern": WHITESPACE}}
    assert schema_of({"response_format": {"type": "json_object"}}) == expected
    assert schema_of({"structured_outputs": {"json_object": True}}) == expected


def test_a_strict_schema_leaves_no_choice_of_whitespace() -> None:
    strict = {"name": "n", "schema": SCHEMA, "strict": True}
    options = schema_of({"response_format": {"type": "json_schema", "json_schema": strict}})["x-guidance"]
    assert options == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def test_a_schema_cannot_turn_refusals_off() -> None:
    lenient = {**SCHEMA, "x-guidance": {"lenient": True, "coerce_one_of": True}}
    assert schema_of({"guided_json": lenient}) == FLEXIBLE


def test_a_whitespace_pattern_is_taken_over() -> None:
    fields = {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}
    assert schema_of(fields)["x-guidance"] == {"whitespace_pattern": "[ ]?"}
    nested = {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}
    assert schema_of(nested)["x-guidance"] == {"whitespace_pattern": "[ ]?"}


@pytest.mark.parametrize("name", ["guided_regex", "regex"])
def test_regular_expressions(name: str) -> None:
    assert grammar_of({name: "a|b"}) == (Grammar(GrammarKind.REGEX, "a|b"), name)


def test_choices_are_quoted_alternatives() -> None:
    found = grammar_of({"guided_choice": ['say "hi"', "b\n"]})
    assert found == (Grammar(GrammarKind.LARK, 'start: "say \\"hi\\"" | "b\\n"'), "guided_choice")


def test_a_grammar_with_ebnf_rules_is_ebnf_and_any_other_is_lark() -> None:
    lark = 'start: "a" | "b"'
    assert grammar_of({"guided_grammar": lark}) == (Grammar(GrammarKind.LARK, lark), "guided_grammar")
    for field in ("guided_grammar", "grammar", "ebnf"):
        found = grammar_of({field: 'root ::= "a" | "b"'})
        assert found is not None and found[0].kind is GrammarKind.LARK and "start:" in found[0].source


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"response_format": "json"}, "response_format", "an object with a type"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name and schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "1..64",
        ),
        ({"guided_json": "{"}, "guided_json", "a JSON schema"),
        ({"guided_json": [1]}, "guided_json", "a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "1..1024"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"guided_regex": ""}, "guided_regex", "a regular expression"),
        ({"ebnf": "root ::= ("}, "ebnf", "no EBNF grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of them"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not supported"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        ({"guided_json": {}, "regex": "a"}, "regex", "both set"),
        ({"guided_json": {}, "guided_whitespace_pattern": "a" * 200}, "guided_whitespace_pattern", "128"),
    ],
)
def test_a_wrong_form_names_its_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        grammar_of(fields)
    assert caught.value.field == field


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(10_000):
        schema = {"not": schema}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        grammar_of({"guided_json": schema})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": " "}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": 7}, "grammar"),
    ],
)
def test_what_asks_for_text_asks_for_no_grammar(fields: dict[str, Any], name: str | None) -> None:
    assert asking_field(fields) == name
