"""What needs itself is refused before an output begins; recursion that can end is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar.endless import endless_schema
from specray.grammar.forms import grammar_of, json_grammar
from specray.grammar.sources import endless_rule
from specray.types import Grammar, GrammarKind
from tests.unit.grammar.test_matcher import compiler

NODE = {"$ref": "#/$defs/n"}
ENDLESS: dict[str, tuple[Any, str]] = {
    "itself": ({**NODE, "$defs": {"n": NODE}}, "$defs.n"),
    "the root": ({"$ref": "#"}, "the schema"),
    "allOf": ({"allOf": [{"$ref": "#"}]}, "the schema"),
    "in a property": (
        {"type": "object", "$defs": {"n": NODE}, "properties": {"a": NODE}, "required": ["a"]},
        "$defs.n",
    ),
    "in a property that may be left out": ({"properties": {"a": NODE}, "$defs": {"n": NODE}}, "$defs.n"),
    "each other": (
        {
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
            },
            "$ref": "#/$defs/a",
        },
        "$defs.a",
    ),
    "items": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "the schema"),
    "first items": ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "the schema"),
    "every branch": (
        {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
                "b": {"$ref": "#/$defs/a"},
            }
        }
        | {"$ref": "#/$defs/a"},
        "$defs.a",
    ),
    "names that are not listed": (
        {"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}},
        "the schema",
    ),
    "an anchor": ({"$ref": "#me", "$defs": {"q": {"$anchor": "me", "$ref": "#me"}}}, "$defs.q"),
    "an escaped pointer": (
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}},
        "$defs.'a/b c'",
    ),
}
ENDING: dict[str, Any] = {
    "optional": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    "nullable": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "an empty list": {"type": "array", "items": {"$ref": "#"}},
    "one branch": {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    "another type": {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "enough first items": {"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1},
    "not reached": {"type": "integer", "$defs": {"n": NODE}},
    "an example": {"type": "integer", "examples": [NODE], "$defs": {"n": NODE}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_needs_itself_is_refused_by_its_place(name: str) -> None:
    schema, path = ENDLESS[name]
    schema = json.loads(json.dumps(schema))  # As it is received: no part is two.
    assert endless_schema(schema) == path
    for is_loose in (False, True):
        with pytest.raises(
            InvalidRequestError, match=r"response_format cannot be enforced: .* needs itself"
        ) as caught:
            compiler().check(json_grammar(schema, is_loose=is_loose), field="response_format")
        assert path in str(caught.value) and caught.value.field == "response_format"


@pytest.mark.parametrize("name", ENDING)
def test_recursion_that_can_end_is_enforced(name: str) -> None:
    assert endless_schema(ENDING[name]) is None
    compiler().check(json_grammar(ENDING[name]), field="response_format")


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('start: "a" start', "start"),
        ('start: "a" start | "b" start', "start"),
        ("start: x\nx: y\ny: x", "x"),
        ('start: a | b\na: "1" b\nb: "2" a', "a"),
        ('start: q{3}\nq: "a" (q | "b" q)', "q"),
        ('start: "x"? y\ny: ("a"\n| y)+ y', "y"),
    ],
)
def test_a_rule_that_needs_itself_is_refused_by_its_name(source: str, rule: str) -> None:
    assert endless_rule(Grammar(GrammarKind.LARK, source)) == f"rule {rule}"
    with pytest.raises(InvalidRequestError, match=f"ebnf cannot be enforced: rule {rule} needs itself"):
        compiler().check(Grammar(GrammarKind.LARK, source), field="ebnf")


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" start | "b"',
        'start: ("a" | start)+ "."',
        'start: "a" start?',
        'start: "a" start{0,3}',
        'start: [start] "b"',
        'start: a+\na: "x"\n  | "y" a\n\n\n  | "z"',
        'start: "start: %json {" b // start: start\nb: /a\\/b/ c\nc[lazy]: /x/',
        'start: "a"\nunused: unused',
        'start: %json {"type": "array", "items": {"$ref": "#"}} "b"',
        'start: A b\nA: /[a-z]+/\nb: "" | "x" b',
    ],
)
def test_rules_that_can_end_are_enforced(source: str) -> None:
    assert endless_rule(Grammar(GrammarKind.LARK, source)) is None
    compiler().check(Grammar(GrammarKind.LARK, source), field="ebnf")


def test_rules_of_ebnf_are_looked_at_too() -> None:
    found = grammar_of({"grammar": 'root ::= "a" list\nlist ::= "b" list'})
    assert found is not None
    with pytest.raises(InvalidRequestError, match="grammar cannot be enforced: rule list needs itself"):
        compiler().check(*found[:1], field=found[1])


def test_a_schema_within_a_grammar_is_looked_at_too() -> None:
    source = 'start: "x" | z\nz: %json {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}'
    with pytest.raises(InvalidRequestError, match=r"\$defs\.n needs itself"):
        compiler().check(Grammar(GrammarKind.LARK, source), field="grammar")


def test_many_rules_cost_little() -> None:
    rules = "\n".join(f'r{index}: "a" r{index + 1}' for index in range(4000))
    assert endless_rule(Grammar(GrammarKind.LARK, f"start: r0\n{rules}\nr4000: r0")) == "rule r0"
