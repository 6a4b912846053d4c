"""Calls as models really write them, whole and in a stream: each kind of fault by a text that has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.serving.tools.answer import AnswerParser
from tests.unit.serving.tools.test_any_text import read
from tests.unit.serving.tools.test_tools import row, use

PARAMETERS = {
    "type": "object",
    "$defs": {
        "Mode": {"type": "string", "enum": ["read", "write"]},
        "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    },
    "properties": {
        "s": {"type": "string"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "null"]},
        "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "mode": {"$ref": "#/$defs/Mode"},
        "nullable_mode": {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]},
        "same": {"allOf": [{"$ref": "#/$defs/Mode"}]},
        "point": {"$ref": "#/$defs/Point"},
        "loop": {"$ref": "#/$defs/Loop"},
        "const": {"const": "5"},
        "levels": {"enum": [1, 2, "max"]},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "anything": {"description": "of any type"},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
Calls = list[tuple[str, dict[str, Any]]]


def check(
    name: str, text: str, content: str, calls: Calls, *, thinks: bool = False, thought: str = ""
) -> None:
    """The same is read whole and in a stream, in pieces of any size."""
    for tells_parts in (False, True):
        for size in (1, 3, 10**6):
            parser = AnswerParser(
                use(None, TOOLS),
                row(name),
                reads_reasoning=thinks,
                begins_in_reasoning=thinks,
                tells_parts=tells_parts,
            )
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            found, reasoning, read_calls = read(parser, pieces)
            assert [(tool, json.loads(arguments)) for tool, arguments, _ in read_calls] == calls
            assert all(is_complete for _, _, is_complete in read_calls)
            assert (found, reasoning) == (content, thought)


HERMES: list[tuple[str, str, Calls]] = [
    (
        'ok\n<tool_call>\n{"name": "f", "arguments": {"s": "use </tool_call> here"}}\n</tool_call>',
        "ok",
        [("f", {"s": "use </tool_call> here"})],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "<tool_call>{\\"name\\": \\"g\\"}'
        '</tool_call>"}}</tool_call>',
        "",
        [("f", {"s": '<tool_call>{"name": "g"}</tool_call>'})],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "a\n\tb\x0bc"}}</tool_call>',
        "",
        [("f", {"s": "a\n\tb\x0bc"})],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "C:\\dir \\d"}}</tool_call>',
        "",
        [("f", {"s": "C:\\dir \\d"})],
    ),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call> so', " so", [("f", {})]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name": "f", "s": "a"}</tool_call>', '<tool_call>{"name": "f", "s": "a"}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"a\\"}"}</tool_call>', "", [("f", {"s": "a"})]),
    ('<tool_call>{"arguments": {"s": "a"}, "name": "f"}</tool_call>', "", [("f", {"s": "a"})]),
    ('<tool_call>{"id": "1", "name": "f", "arguments": {"s": "a"}}</tool_call>', "", [("f", {"s": "a"})]),
    ('<tool_call>{"name": "f", "arguments": {"s": "a"}, "id": "1"}</tool_call>', "", [("f", {"s": "a"})]),
    (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"s": "a"}}}</tool_call>',
        "",
        [("f", {"s": "a"})],
    ),
    (
        "<tool_call>{'name': 'f', 'arguments': {'s': 'it\\'s \"x\"', 'flag': True, "
        "'optional': None,}}</tool_call>",
        "",
        [("f", {"s": 'it\'s "x"', "flag": True, "optional": None})],
    ),
    (
        '<tool_call>\n```json\n{"name": "f", "arguments": {"s": "a"}}\n```\n</tool_call>',
        "",
        [("f", {"s": "a"})],
    ),
    ('<tool_call>[{"name": "f"}, {"name": "g", "arguments": {}}]</tool_call>', "", [("f", {}), ("g", {})]),
    ('<tool_call>{"name": "f", "arguments": {"s": "a"}}}\n</tool_call>', "", [("f", {"s": "a"})]),
    ('<tool_call>{"name": "f", "arguments": {"s": "a"}\n</tool_call>', "", [("f", {"s": "a"})]),
    ('<tool_call>{"name": "f", "arguments": {"s": "a"}}', "", [("f", {"s": "a"})]),
    (
        'ok\n<tool_call>\nthinking\n<tool_call>\n{"name": "f", "arguments": {"s": "a"}}\n</tool_call>',
        "ok\n<tool_call>\nthinking",
        [("f", {"s": "a"})],
    ),
    ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", {})]),
    (
        'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g"}</tool_call> c',
        "a b c",
        [("f", {}), ("g", {})],
    ),
    (
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "h"}</tool_call><tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "h"}</tool_call>',
        [("f", {})],
    ),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_a_call_as_an_object_is_read_with_its_faults(text: str, content: str, calls: Calls) -> None:
    check("hermes", text, content, calls)


def written(key: str, value: str) -> str:
    return (
        f"ok\n<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


NAMED: list[tuple[str, str, str, Calls]] = [
    (
        "hunyuan",
        '<tool_calls>\n<tool_call>f\n```json\n{"s": "``` </tool_call>"}\n```</tool_call>\n'
        "<tool_call>g\n```json\n{}\n```"
        "</tool_call>\n</tool_calls> so",
        " so",
        [("f", {"s": "``` </tool_call>"}), ("g", {})],
    ),
    (
        "hunyuan",
        '<tool_calls>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_calls>',
        "",
        [("f", {}), ("g", {})],
    ),
    (
        "kimi_k2",
        "so<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"s": "<|tool_call_end|>"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "so",
        [("f", {"s": "<|tool_call_end|>"}), ("g", {})],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "```"}\n'
        "```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("f", {"s": "```"}), ("g", {})],
    ),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>null<｜tool▁call▁end｜>", "", [("f", {})]),
    (
        "mistral_args",
        '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"s": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{} so',
        " so",
        [("f", {"s": "[TOOL_CALLS]"}), ("g", {})],
    ),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]"{\\"s\\": \\"a\\"}"', "", [("f", {"s": "a"})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "]"}}] so', " so", [("f", {"s": "]"})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "a"}', "", [("f", {"s": "a"})]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"s": "a"}}', "", [("f", {"s": "a"})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}',
        "",
        [("f", {}), ("g", {})],
    ),
    ("llama3_json", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    ("llama3_json", 'So {"name": "f"}', 'So {"name": "f"}', []),
    ("granite", '<|tool_call|>[{"arguments": {"s": "a"}, "name": "f"}]', "", [("f", {"s": "a"})]),
    ("granite", '<|tool_call|>[{"type": "function", "function": "f", "arguments": {}}]', "", [("f", {})]),
    (
        "granite",
        '<|tool_call|>[{"type": "function", "function": 1}]',
        '<|tool_call|>[{"type": "function", "function": 1}]',
        [],
    ),
    ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', "", [("f", {})]),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {}}]', "", [("f", {})]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), NAMED)
def test_calls_of_other_formats_are_read_with_their_faults(
    name: str, text: str, content: str, calls: Calls
) -> None:
    check(name, text, content, calls)


def test_a_call_keeps_the_id_that_the_model_wrote_once() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    parser = AnswerParser(use(None, TOOLS), row("kimi_k2"))
    ids = [delta.call_id for delta in parser.push(2 * call).calls]
    assert ids[0] == "functions.f:0" and len(set(ids)) == 2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</think>"}}</tool_call>'),
        ("qwen3_coder", written("s", "</think>").removeprefix("ok\n")),
    ],
)
def test_a_call_within_reasoning_is_read(name: str, call: str) -> None:
    calls: Calls = [("f", {"s": "</think>"})]
    check(name, f"hm\n{call}\n</think>\n\nso", "so", calls, thinks=True, thought="hm")
    check(name, f"hm\n{call}", "", calls, thinks=True, thought="hm")
    check(name, f"hm</think>{call}", "", calls, thinks=True, thought="hm")
    check(name, "I could <tool_call> now", "", [], thinks=True, thought="I could <tool_call> now")


@pytest.mark.parametrize(
    ("name", "text", "streamed"),
    [
        ("hermes", 'ok <tool_call>{"name": "f", "arguments": {"s": "Ro', '{"s": "Ro'),
        ("hermes", 'ok <tool_call>{"name": "f", "arguments": {"s": Rome}}</tool_call>', '{"s": '),
        ("qwen3_coder", "ok <tool_call>\n<function=f>\n<parameter=s>\nRo", '{"s": "Ro'),
        ("qwen3_coder", "ok <tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n", '{"s": "a"'),
        ("glm45", "ok <tool_call>f\n<arg_key>s</arg_key>\n<arg_value>Ro", '{"s": "Ro'),
    ],
)
def test_a_call_that_breaks_off_is_text_but_where_parts_of_it_were_given(
    name: str, text: str, streamed: str
) -> None:
    for size in (1, 10**6):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(AnswerParser(use(None, TOOLS), row(name)), pieces) == (text, "", [])
        parser = AnswerParser(use(None, TOOLS), row(name), tells_parts=True)
        assert read(parser, pieces)[2] == [("f", streamed, False)]


def test_a_second_call_is_dropped_without_parallel_calls_and_its_broken_text_is_not() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for tells_parts in (False, True):
        for second, content in ((call, " so!"), (call[:-16], f"{call[:-16]} so!")):
            parser = AnswerParser(use(None, TOOLS, is_parallel=False), row("hermes"), tells_parts=tells_parts)
            assert read(parser, [call, second, " so!"]) == (content, "", [("f", "{}", True)])
