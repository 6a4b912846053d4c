"""Tools: fields of requests, calls read from text in pieces of any size, and forced calls that read back."""

from __future__ import annotations

import json
import random
import time
from typing import Any, NamedTuple

import jsonschema
import pytest

from specray.errors import InvalidRequestError
from specray.serving.tools.answer import AnswerParser
from specray.serving.tools.forced import forced_calls
from specray.serving.tools.formats import FORMATS, ToolFormat, find_format
from specray.serving.tools.request import ToolMode, ToolUse, parse_tools
from tests.unit.grammar.test_matcher import ENDS, backend, compiler, legal, piece

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}


class ToolCall(NamedTuple):
    """One call as it was read."""

    name: str
    arguments: str


TEXTS: dict[str, tuple[str, list[ToolCall]]] = {
    "hermes": (
        'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        [ToolCall("get_weather", '{"city": "Rome"}'), ToolCall("clock", "{}")],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        [ToolCall("get_weather", '{"city": "Rome", "days": 3}')],
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}, '
        '{"name": "clock", "arguments": {}}]',
        [ToolCall("get_weather", '{"city": "Rome"}'), ToolCall("clock", "{}")],
    ),
    "mistral_args": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[ARGS]{}',
        [ToolCall("get_weather", '{"city": "Rome"}'), ToolCall("clock", "{}")],
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        [ToolCall("get_weather", '{"city": "Rome"}')],
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [ToolCall("get_weather", '{"city": "Rome"}'), ToolCall("clock", "{}")],
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n</tool_call>",
        [ToolCall("get_weather", '{"city": "Rome"}'), ToolCall("clock", "{}")],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        "</invoke>\n"
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        [ToolCall("get_weather", '{"city": "Rome"}'), ToolCall("clock", "{}")],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        [ToolCall("get_weather", '{"city": "Rome"}')],
    ),
    "pythonic": (
        '[get_weather(city="Rome", days=2), clock()]',
        [ToolCall("get_weather", '{"city": "Rome", "days": 2}'), ToolCall("clock", "{}")],
    ),
}


def row(name: str) -> ToolFormat:
    return next(entry for entry in FORMATS if entry.name == name)


def opening(name: str) -> str:
    """Text with which calls begin."""
    return (*row(name).starts, row(name).bare)[0]


def closing(name: str) -> str:
    """Text that ends calls; empty: there is none."""
    return {"hermes": "</tool_call>", "qwen3_coder": "</tool_call>"}.get(name, "")


def use(choice: Any = None, tools: Any = (WEATHER, CLOCK), is_parallel: bool | None = None) -> ToolUse:
    found = parse_tools(list(tools), choice, is_parallel)
    assert found is not None
    return found


def read(parser: AnswerParser, text: str, size: int) -> tuple[str, str, list[ToolCall]]:
    deltas = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(parser.finish())
    calls = [delta for each in deltas for delta in each.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.call_id for call in calls}) == len(calls)
    assert all(call.is_first and call.is_last for call in calls)
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return content, reasoning, [ToolCall(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_read_from_pieces_of_any_size(name: str, size: int) -> None:
    text, calls = TEXTS[name]
    content, _, read_calls = read(AnswerParser(use(), row(name)), text, size)
    assert read_calls == calls
    assert content in ("", "Sure.")


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_reasoning_stands_apart_also_where_the_prompt_opened_it(size: int) -> None:
    tail = 'Hm.\n</think>\n\nYes.<tool_call>{"name": "clock"}</tool_call>'
    for begins, text in ((False, "<think>\n" + tail), (True, tail)):
        parser = AnswerParser(use(), row("hermes"), reads_reasoning=True, begins_in_reasoning=begins)
        content, reasoning, calls = read(parser, text, size)
        assert (content, reasoning, calls) == ("Yes.", "Hm.", [ToolCall("clock", "{}")])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "clock", "arguments": {</tool_call> after',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "clock", "arguments": [1]}',
        "a < b and <tool_",
    ],
)
def test_malformed_calls_are_content_and_nothing_is_lost(text: str, size: int) -> None:
    content, _, calls = read(AnswerParser(use(), row("hermes")), text, size)
    assert calls == []
    assert content == text


@pytest.mark.parametrize(
    ("name", "call", "arguments"),
    [
        ("hermes", '{"name": "clock", "arguments": {"a": "\\ud800"}}', '{"a": "\\ud800"}'),
        ("hermes", '{"name": "clock", "arguments": {"a": "é"}}', '{"a": "é"}'),
        ("hermes", '{"name": "clock", "arguments": {"a": NaN}}', None),
        ("hermes", '{"name": "clock", "arguments": {"a": 1e999}}', '{"a": 1e999}'),
        ("pythonic", "clock(a={1})]", None),
        ("pythonic", "clock(a=b'1')]", None),
        ("pythonic", "clock(a={[]: 1})]", None),
        ("pythonic", "clock(**a)]", None),
        ("pythonic", "clock(1)]", None),
    ],
)
def test_arguments_are_json_that_can_be_sent_or_the_call_is_content(
    name: str, call: str, arguments: str | None
) -> None:
    text = opening(name) + call + (closing(name))
    content, _, calls = read(AnswerParser(use(), row(name)), text, 4)
    assert [each.arguments for each in calls] == ([] if arguments is None else [arguments])
    assert content == ("" if calls else text)


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS])
@pytest.mark.parametrize(
    "filler", [" ", "\n", "[ARGS]", "[TOOL_CALLS]", "<parameter=a>", '{"name":', "a", "("]
)
def test_nothing_that_a_model_writes_makes_reading_slow(name: str, filler: str) -> None:
    tool_format = row(name)
    text = opening(name) + filler * (100_000 // len(filler)) + "~[ARGS]" + closing(name)
    parser = AnswerParser(use(), tool_format)  # The first one imports its library.
    started = time.process_time()
    content, _, calls = read(parser, text, 50_000)
    assert time.process_time() - started < 2
    assert (content, calls) == (text, [])


def test_whitespace_around_calls_and_reasoning_is_no_content() -> None:
    call = '<tool_call>{"name": "clock"}</tool_call>'
    for text, content, reasoning in (
        (f" a \n{call}\n\n{call}\n", " a", ""),
        (f"{call}\n b ", "\n b", ""),
        ("a \n", "a \n", ""),
        ("<think>\n c \n</think>\n\n d ", "d ", "c"),
    ):
        for size in (1, 3, 100):
            parser = AnswerParser(use(), row("hermes"), reads_reasoning=True)
            assert read(parser, text, size)[:2] == (content, reasoning)


def test_nothing_is_read_when_calls_are_switched_off() -> None:
    text = TEXTS["hermes"][0]
    assert read(AnswerParser(use("none"), row("hermes")), text, 3) == (text, "", [])
    assert read(AnswerParser(None, row("hermes")), text, 3) == (text, "", [])


def test_a_tool_outside_the_allowed_ones_is_not_called() -> None:
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]},
    }
    _, _, calls = read(AnswerParser(use(choice), row("hermes")), TEXTS["hermes"][0], 9)
    assert calls == [ToolCall("clock", "{}")]


def random_answer(tool_use: ToolUse, name: str, seed: int) -> str | None:
    grammar = forced_calls(tool_use, row(name), lambda text: None)
    assert grammar is not None
    compiler().check(grammar, field="tool_choice")
    chance, matcher, output = random.Random(seed), compiler().matcher(grammar), list[int]()
    for _ in range(300):
        choices = legal(matcher.masks(output)[0])
        if choices & ENDS and (choices <= ENDS or chance.random() < 0.5):
            return str(backend().decode(output))
        pool = sorted(choices - ENDS)
        short = [token for token in pool if not piece(token).isspace()] or pool
        output.append(chance.choice(short))
    return None


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS if entry.can_be_forced])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_what_is_forced_reads_back_as_valid_calls(name: str, choice: Any) -> None:
    tool_use = use(choice)
    answers = [text for seed in range(4) if (text := random_answer(tool_use, name, seed)) is not None]
    assert answers
    for text in answers:
        content, _, calls = read(AnswerParser(tool_use, row(name)), text, 5)
        assert calls and not content.strip(), text
        for call in calls:
            assert choice == "required" or call.name == "get_weather"
            schemas = {tool.name: tool.parameters for tool in tool_use.tools}
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS if entry.writes_parameters])
def test_forced_strings_between_tags_read_back(name: str) -> None:
    entry = row(name)
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}}
    tools = use("required", [{"type": "function", "function": tool}])
    grammar = forced_calls(tools, entry, lambda text: None)
    assert grammar is not None
    value = "a\nb </x> c"
    text = (
        f"{entry.begin}{entry.before_name}f{entry.after_name}{entry.before_key}s{entry.after_key}{value}"
        f"{entry.after_value}{entry.after}{entry.end}"
    )
    tokens = tuple(backend().encode(text, add_special_tokens=False).ids)
    assert compiler().matcher(grammar).count_legal((), tokens) == len(tokens)
    assert read(AnswerParser(tools, entry), text, 3)[2] == [ToolCall("f", json.dumps({"s": value}))]


def test_forced_arguments_end_at_the_token_that_ends_them() -> None:
    ids = {"<tool_call>": 11, "</tool_call>": 12, "<arg_key>": 13, "</arg_key>": 14, "<arg_value>": 15}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}}
    tools = use("required", [{"type": "function", "function": tool}])
    grammar = forced_calls(tools, row("glm45"), {**ids, "</arg_value>": 16}.get)
    assert grammar is not None
    compiler().check(grammar, field="tool_choice")
    assert 'arg_0_0: <[13]> "s" <[14]> "\\n" <[15]> TEXT_0_0 <[16]> "\\n"' in grammar.source.splitlines()


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS if entry.can_be_forced])
def test_one_call_at_most_without_parallel_calls(name: str) -> None:
    tool_use = use("required", is_parallel=False)
    for seed in range(4):
        text = random_answer(tool_use, name, seed)
        if text is not None:
            assert len(read(AnswerParser(tool_use, row(name)), text, 5)[2]) == 1


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_a_strict_tool_leaves_text_free_and_calls_valid(name: str) -> None:
    grammar = forced_calls(use("auto"), row(name), lambda text: None)
    assert grammar is not None
    matcher = compiler().matcher(grammar)
    free = tuple(backend().encode("Hello, I am free.", add_special_tokens=False).ids)
    assert matcher.count_legal((), free) == len(free) and ENDS & legal(matcher.masks(free)[0])
    call = tuple(backend().encode(TEXTS[name][0].removeprefix("Sure.\n"), add_special_tokens=False).ids)
    assert matcher.count_legal((), call) == len(call)
    wrong = TEXTS[name][0].removeprefix("Sure.\n").replace("Rome", "Oslo")
    broken = tuple(backend().encode(wrong, add_special_tokens=False).ids)
    assert matcher.count_legal((), broken) < len(broken)


def test_free_answers_have_no_grammar() -> None:
    assert forced_calls(use("auto", tools=[WEATHER]), row("hermes"), lambda text: None) is None
    assert forced_calls(use("none"), row("hermes"), lambda text: None) is None


@pytest.mark.parametrize("tool_format", [None, row("pythonic")])
def test_an_unknown_format_cannot_be_forced(tool_format: ToolFormat | None) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced"):
        forced_calls(use("required"), tool_format, lambda text: None)


def test_the_format_is_told_by_the_chat_template() -> None:
    def name(template: str) -> str | None:
        found = find_format(template)
        return None if found is None else found.name

    assert name("... <tool_call> ... <function=...") == "qwen3_coder"
    assert name('<tool_call>\n{"name": <function-name>}') == "hermes"
    assert name("'<tool_call>' + (call.function | tojson)") == "hermes"
    assert name("<tool_call> {{ name }}") is None
    assert name("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>") == "glm45"
    assert name("<tool_calls>\n<tool_call>name\n```json\n{}\n```</tool_call>\n</tool_calls>") == "hunyuan"
    assert name("<tool_calls><tool_call>name<tool_sep>\n<arg_key>") == "hunyuan_v3"
    assert name("{%- set begin = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">") == "minimax_m2"
    assert name("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>") == "deepseek_v31"
    assert name("<｜tool▁calls▁begin｜>' + name + '\\n' + '```json'") == "deepseek_v3"
    assert name("{{ call['id'] }}<|tool_call_argument_begin|>") == "kimi_k2"
    assert name("<|tool|>{{ tools }}<|/tool|>") == "phi4_mini"
    assert name("respond with <|tool_call|> followed by a JSON list of tools used") == "granite"
    assert name("<|tool_call>call:{{ name }}") is None
    assert name("<｜DSML｜function_calls>") is None
    assert name("[TOOL_CALLS]") == "mistral"
    assert name("[TOOL_CALLS] [ARGS]") == "mistral_args"
    assert name("<|python_tag|>") == "llama3_json"
    assert name("no tools here") is None
    assert find_format(None) is None


def test_choices_of_tools() -> None:
    assert (use(None).mode, use("none").mode, use("required").mode) == (
        ToolMode.AUTO,
        ToolMode.NONE,
        ToolMode.REQUIRED,
    )
    named = use({"type": "function", "function": {"name": "clock"}})
    assert (named.mode, named.allowed, named.is_named) == (ToolMode.REQUIRED, {"clock"}, True)
    assert (named.is_parallel, use("required").is_parallel) == (False, True)
    assert [tool.name for tool in named.callable_tools] == ["clock"]
    assert parse_tools(None, None, None) is None and parse_tools([], "none", True) is None
    assert not use(None, is_parallel=False).is_parallel


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ("x", None, "tools"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([WEATHER, WEATHER], None, "tools[1].function.name"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": []}}],
            None,
            "tools[0].function.parameters",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}],
            None,
            "tools[0].function.parameters.properties",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"required": "b"}}}],
            None,
            "tools[0].function.parameters.required",
        ),
        ([WEATHER], "any", "tool_choice"),
        ([WEATHER], {"type": "function", "function": {"name": "clock"}}, "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        ([WEATHER], {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}, "tool_choice.allowed_tools"),
    ],
)
def test_wrong_tools_name_their_field(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tools(tools, choice, None)
    assert caught.value.field == field
