"""Calls in the words of other formats, calls that the end of an answer cuts, and numbers between tags."""

from __future__ import annotations

import pytest

from specray.serving.tools.answer import AnswerParser
from tests.unit.serving.tools.test_any_text import read
from tests.unit.serving.tools.test_calls_as_written import TOOLS, check
from tests.unit.serving.tools.test_tools import row, use

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FIRST = '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>'
OTHERS: dict[str, tuple[str, str, str]] = {
    "brackets of the template": (
        "hermes",
        '<tool_call>{{"name": "f", "arguments": {"s": "x"}}}</tool_call>',
        "",
    ),
    "JSON in a format of tags": ("qwen3_coder", f"a\n{FIRST}", "a"),
    "JSON amid arg_key": ("glm45", f"{FIRST} b", " b"),
    "a block of code after the name": ("deepseek_v31", DEEPSEEK.format('\n```json\n{"s": "x"}\n```'), ""),
    "a closing marker that is not taught": (
        "granite",
        '<tool_call>{"name": "f", "arguments": {"s": "x"}}</tool_call>',
        "",
    ),
    "both markers": (
        "phi4_mini",
        '<|tool_call|>functools[{"name": "f", "arguments": {"s": "x"}}]<|/tool_call|>',
        "",
    ),
    "without the outer markers": (
        "hunyuan",
        '<tool_call>f\n```json\n{"s": "x"}\n```</tool_call>\n',
        "",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_calls_in_the_words_of_another_format_are_read(name: str) -> None:
    form, text, content = OTHERS[name]
    check(form, text, content, [("f", {"s": "x"})])


CUTS = {
    "hermes": (FIRST, '\n<tool_call>\n{"name": "f", "arguments": '),
    "qwen3_coder": (FIRST, "\n<tool_call>\n<function=f>"),
    "glm45": (FIRST, "<tool_call>f\n<arg_key>s</arg_k"),
    "deepseek_v31": (
        DEEPSEEK.format('{"s": "x"}').removesuffix("<｜tool▁calls▁end｜>"),
        "<｜tool▁call▁begin｜>f<｜tool▁se",
    ),
    "granite": ('<|tool_call|>[{"name": "f", "arguments": {"s": "x"}}', ', {"name": "'),
    "mistral_args": ('[TOOL_CALLS]f[ARGS]{"s": "x"}', "[TOOL_CALLS]f[AR"),
    "minimax_m2": (
        '<invoke name="f"><parameter name="s">x</parameter></invoke></minimax:tool_call>',
        '\n<minimax:tool_call>\n<invoke name="f',
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_the_cut_beginning_of_a_call_is_text_beside_a_complete_one_and_alone(name: str) -> None:
    first, cut = CUTS[name]
    for size in (1, 3, 1000):
        text = first + cut
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        content, _, calls = read(AnswerParser(use(None, TOOLS), row(name)), parts)
        assert [call[0] for call in calls] == ["f"]
        assert content.endswith(cut.rstrip())
    check(name, cut, cut, [])


def test_text_after_a_call_that_might_go_on_with_another_one_is_text() -> None:
    check("mistral_args", "[TOOL_CALLS]f[ARGS]{} so", " so", [("f", {})])
    check("granite", '<|tool_call|>[{"name": "f", "arguments": {}} <', " <", [("f", {})])


NUMBERS = {
    ("count", "9007199254740993.0"): "9007199254740993.0",
    ("count", "123456789012345678901234567890"): "123456789012345678901234567890",
    ("ratio", "0.12345678901234567890123"): "0.12345678901234567890123",
    ("anything", "1.50"): "1.50",
    ("ratio", ".5"): "0.5",
    ("ratio", "+1"): "1",
    ("ratio", "1e999"): '"1e999"',
    ("items", "(1, 'a')"): '[1, "a"]',
    ("items", "{1, 2}"): '"{1, 2}"',
    ("anything", "+4912345"): '"+4912345"',
}


@pytest.mark.parametrize(("key", "text"), NUMBERS)
def test_numbers_between_tags_keep_their_digits_and_literals_of_python_are_read(key: str, text: str) -> None:
    call = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    parser = AnswerParser(use(None, TOOLS), row("glm45"))
    assert read(parser, [call])[2] == [("f", f'{{"{key}": {NUMBERS[key, text]}}}', True)]
