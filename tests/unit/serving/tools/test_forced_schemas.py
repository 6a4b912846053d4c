"""Forced calls are held to their tools' schemas: wholly where strict, else as far as they can be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import MAX_SOURCE_LEN
from specray.grammar.forms import json_grammar
from specray.serving.tools.forced import forced_calls
from specray.serving.tools.formats import FORMATS, ToolFormat
from specray.serving.tools.request import parse_tools
from specray.types import Grammar
from tests.unit.grammar.test_matcher import backend, compiler

MODE = {"type": "string", "enum": ["r", "w"]}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
STRINGS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "free": ({"type": "string"}, ("", "a\nb", '<b> & "c"', "12"), ()),
    "maxLength": ({"type": "string", "maxLength": 3}, ("", "a\n\u00e9"), ("abcd",)),
    "minLength": ({"type": "string", "minLength": 2}, ("ab", "\n\n\n"), ("a", "")),
    "pattern": ({"type": "string", "pattern": "^[a-c]+/[0-9]$"}, ("ab/1",), ("ab/1x", "xab/1", "ab1")),
    "a pattern within": ({"type": "string", "pattern": "[0-9]{2}"}, ("12", "a123\n"), ("1a2",)),
    "half an anchor": ({"type": "string", "pattern": "^a"}, ("a", "ab"), ("ba",)),
    "an escaped sign": ({"type": "string", "pattern": r"^a\$"}, ("a$", "a$b"), ("a",)),
    "all of them": (
        {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 3},
        ("ab", "abc"),
        ("a", "abcd", "a1"),
    ),
    "date": ({"type": "string", "format": "date"}, ("2024-01-31",), ("2024-02-31", "x")),
    "date-time": ({"type": "string", "format": "date-time"}, ("2024-01-31T10:00:00Z",), ("2024-01-31",)),
    "uuid": ({"type": "string", "format": "uuid"}, ("01234567-89ab-cdef-0123-456789abcdef",), ("01234567",)),
    "email": ({"type": "string", "format": "email"}, ("a.b@c.de",), ("a.b", "a@b")),
    "ipv4": ({"type": "string", "format": "ipv4"}, ("127.0.0.1",), ("256.0.0.1",)),
    "enum": (MODE, ("r", "w"), ("x", "rw")),
    "const": ({"const": "a/b"}, ("a/b",), ("a",)),
    "a name of a token": ({"const": "<|im_end|> </tool_call>"}, ("<|im_end|> </tool_call>",), ()),
    "reference": ({"$ref": "#/$defs/Mode"}, ("r",), ("x", '"r"')),
    "reference in allOf": ({"allOf": [{"$ref": "#/$defs/Mode"}], "description": "d"}, ("w",), ("x",)),
    "optional": ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ("ab", "null"), ("abc",)),
    "optional reference": ({"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]}, ("r", "null"), ("x",)),
    "two types": ({"type": ["boolean", "string"], "maxLength": 1}, ("true", "a"), ("ab",)),
    "mixed values": ({"enum": ["a", 1, None, [2]]}, ("a", "1", "null", "[2]"), ("b", "2")),
    "number": ({"type": "integer", "minimum": 3}, ("3",), ("2", '"3"')),
    "list": ({"type": "array", "items": {"$ref": "#/$defs/Mode"}}, ('["r", "w"]',), ('["x"]', "r")),
    "list of another parameter's kind": (
        {"type": "array", "items": {"$ref": "#/properties/other"}},
        ("[true]",),
        ("[1]",),
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "format": ({"type": "string", "format": "uri"}, "v.format: 'uri'"),
    "string or object": (
        {"anyOf": [{"type": "string"}, {"type": "object", "required": ["q"]}]},
        "v: a string or a value that may look like one",
    ),
    "string or bounded": (
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        "v: a string or a value that may look like one",
    ),
}


def row(name: str) -> ToolFormat:
    return next(entry for entry in FORMATS if entry.name == name)


def forced(parameters: Any, *, strict: bool, name: str = "qwen3_coder", choice: str = "required") -> Grammar:
    tools = [
        {"type": "function", "function": {"name": "fine", "parameters": {"properties": {"a": MODE}}}},
        {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}},
    ]
    use = parse_tools(tools, choice, False)
    assert use is not None
    grammar = forced_calls(use, row(name), lambda text: None)
    assert grammar is not None
    compiler().check(grammar, field="tools")
    return grammar


def accepts(grammar: Grammar, text: str) -> bool:
    token_ids = tuple(backend().encode(text, add_special_tokens=False).ids)
    matcher = compiler().matcher(grammar)
    return matcher.count_legal((), token_ids) == len(token_ids) and matcher.is_complete(token_ids)


def call(value: str, key: str = "v") -> str:
    tags = f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS if entry.writes_parameters])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_every_format_with_tags_holds_strings(name: str, has_tokens: bool) -> None:
    """Where a closing tag is a token of its own, too: here the end token stands for all of them."""
    tool_format = row(name)
    use = parse_tools(
        [{"type": "function", "function": {"name": "f", "parameters": around(STRINGS["all of them"][0])}}],
        "required",
        False,
    )
    assert use is not None
    grammar = forced_calls(
        use, tool_format, lambda text: 2 if has_tokens and text == "</arg_value>" else None
    )
    assert grammar is not None
    compiler().check(grammar, field="tools")
    for value, is_good in (("ab", True), ("abc", True), ("abcd", False), ("a1", False)):
        head = f"{tool_format.begin}{tool_format.before_name}f{tool_format.after_name}"
        tags = f"{tool_format.before_key}v{tool_format.after_key}{value}{tool_format.after_value}"
        text = f"{head}{tags}{tool_format.after}{tool_format.end}"
        token_ids = [
            token_id
            for place, part in enumerate(text.split("</arg_value>" if has_tokens else "\0"))
            for token_id in (*((2,) if place else ()), *backend().encode(part, add_special_tokens=False).ids)
        ]
        assert (compiler().matcher(grammar).count_legal((), token_ids) == len(token_ids)) is is_good, value


def around(schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "$defs": {"Mode": MODE},
        "properties": {"v": schema, "other": {"type": "boolean"}},
        "required": ["v"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("strict", [True, False])
def test_values_between_tags_are_held_to_their_schema(name: str, strict: bool) -> None:
    schema, good, bad = STRINGS[name]
    grammar = forced(around(schema), strict=strict)
    assert [value for value in good if not accepts(grammar, call(value))] == []
    assert [value for value in bad if accepts(grammar, call(value))] == []
    assert not accepts(grammar, call("a\n</parameter>\nb")), "the first closing tag ends a value"


@pytest.mark.parametrize("name", REFUSED)
def test_a_string_that_cannot_be_held_is_refused_for_a_strict_tool_alone(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InvalidRequestError) as caught:
        forced(around(schema), strict=True)
    assert caught.value.field == "tools"
    assert str(caught.value) == (
        f"tools[1].function.parameters cannot be enforced in this model's format of calls: {reason}"
    )
    assert accepts(forced(around(schema), strict=False), call("any text"))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"$ref": "#/$defs/A", "$defs": {"A": around(MODE)}}, "r"),
        ({"allOf": [around(MODE)]}, "w"),
        ({"type": "object", "required": ["v"], "additionalProperties": MODE}, "r"),
    ],
)
def test_parameters_may_stand_elsewhere(parameters: Any, text: str) -> None:
    grammar = forced(parameters, strict=True)
    assert accepts(grammar, call(text)) and not accepts(grammar, call("x"))


def test_a_map_has_any_names() -> None:
    grammar = forced(
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 2}}, strict=True
    )
    assert accepts(grammar, call("ab", key="any name")) and not accepts(grammar, call("abc", key="any name"))
    closed = forced({"type": "object", "properties": {}}, strict=True)
    assert not accepts(closed, call("ab")) and accepts(
        closed, "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"anyOf": [around(MODE), {"type": "object"}]}, "anyOf: alternatives of all arguments"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1, "required": ["a"]}, "maxProperties"),
        ({"properties": {"a<b": {"type": "string"}}}, "a<b: a name with <, > or a line break"),
    ],
)
def test_what_binds_all_arguments_is_refused_for_a_strict_tool_alone(parameters: Any, reason: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"tools\[1\]\.function\.parameters cannot be enforced"
    ) as caught:
        forced({"type": "object", **parameters}, strict=True)
    assert reason in str(caught.value)
    forced({"type": "object", **parameters}, strict=False)


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS if entry.can_be_forced])
def test_one_keyword_that_cannot_be_enforced_loosens_its_field_alone(name: str) -> None:
    schema = {**around({"type": "string", "format": "email", "pattern": EMAIL}), "required": ["v", "other"]}
    assert '"boolean"' in forced(schema, strict=False, name=name).source
    with pytest.raises(InvalidRequestError) as caught:
        forced(schema, strict=True, name=name)
    assert caught.value.field == "tools"
    assert str(caught.value) == (
        "tools[1].function.parameters cannot be enforced: "
        "properties.v.pattern: look-around, including look-ahead and look-behind, is not supported"
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "the schema needs itself"),
        ({"properties": {"n": {"enum": []}}, "required": ["n"]}, "required property 'n' is unsatisfiable"),
    ],
)
def test_arguments_that_cannot_be_are_refused_for_every_tool(
    strict: bool, parameters: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[1\]\.function\.parameters") as caught:
        forced({"type": "object", **parameters}, strict=strict, name="hermes")
    assert reason in str(caught.value) and caught.value.field == "tools"


def test_long_descriptions_are_no_part_of_a_strict_schema() -> None:
    described = {f"p{index}": {"description": "d" * 900} for index in range(100)}
    forced({"type": "object", "properties": described}, strict=True)


def test_a_text_or_calls_hold_schemas_that_are_not_strict_as_far_as_they_can_be() -> None:
    use = parse_tools(
        [{"type": "function", "function": {"name": "f", "parameters": around({"not": {}})}}], None, False
    )
    assert use is not None
    assert forced_calls(use, row("hermes"), lambda text: None) is None
    grammar = forced_calls(use, row("hermes"), lambda text: None, text=json_grammar({"enum": [7]}))
    assert grammar is not None
    compiler().check(grammar, field="tools")
    assert accepts(grammar, "7")
    arguments = json.dumps({"v": 1})
    assert accepts(grammar, f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_512_tools_are_forced_and_held_to_their_schemas_where_these_have_room(name: str) -> None:
    def grammar(num_fields: int) -> Grammar:
        fields = {f"a_field_of_some_length_{index}": {"enum": ["a", "b"]} for index in range(num_fields)}
        schema = {
            "type": "object",
            "properties": fields,
            "required": [*fields],
            "additionalProperties": False,
        }
        function = {"parameters": schema}
        tools = [
            {"type": "function", "function": {"name": f"mcp__server__tool_{index}", **function}}
            for index in range(512)
        ]
        use = parse_tools(tools, "required", None)
        assert use is not None
        found = forced_calls(use, row(name), lambda text: None)
        assert found is not None
        return found

    small = grammar(1)
    assert 65_536 < len(small.source) < MAX_SOURCE_LEN and "a_field" in small.source
    compiler().check(small, field="tools")
    free = grammar(40)
    assert len(free.source) < MAX_SOURCE_LEN and "a_field" not in free.source


def test_a_long_schema_is_held_to_for_a_strict_tool_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 65_536]}}}
    assert accepts(
        forced(schema, strict=False, name="hermes"),
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    )
    with pytest.raises(InvalidRequestError, match=r"tools\[1\].*allowed for a strict tool: at most 65536"):
        forced(schema, strict=True, name="hermes")
