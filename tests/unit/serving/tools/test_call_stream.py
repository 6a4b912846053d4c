"""Calls in a stream: arguments in pieces of any size, cut where they break off, and what is no call."""

from __future__ import annotations

import json
import random
import time

import pytest

from specray.serving.tools.answer import AnswerParser, CallDelta
from specray.serving.tools.formats import FORMATS
from specray.serving.tools.json_prefix import JsonPrefix
from tests.unit.serving.tools.test_tools import CLOCK, TEXTS, WEATHER, row, use

VERBATIM = '{"city" :"Rome",\t"days":2 }'
HEAD = '<tool_call>\n{"name": "get_weather", "arguments": '


def parts_of(parser: AnswerParser, text: str, size: int) -> tuple[str, list[CallDelta]]:
    """The content, and the parts of calls."""
    deltas = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(parser.finish())
    return "".join(delta.content for delta in deltas), [part for delta in deltas for part in delta.calls]


def stream(name: str = "hermes", *, is_parallel: bool | None = None) -> AnswerParser:
    return AnswerParser(use(None, (WEATHER, CLOCK), is_parallel), row(name), tells_parts=True)


def put_together(parts: list[CallDelta]) -> list[tuple[str, str, bool]]:
    """Name, arguments, and whether they are complete, of each call; parts come in order."""
    calls = list[tuple[str, str, bool]]()
    for part in parts:
        assert part.is_first == (part.index == len(calls))
        if part.is_first:
            calls.append((part.name, "", False))
        name, arguments, is_complete = calls[part.index]
        assert part.index == len(calls) - 1 and name == part.name and not is_complete
        calls[part.index] = (name, arguments + part.arguments, part.is_last)
    assert len({part.call_id for part in parts}) == len(calls)
    return calls


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_of_every_format_come_in_parts_or_whole(name: str, size: int) -> None:
    text, calls = TEXTS[name]
    content, parts = parts_of(stream(name), text, size)
    assert put_together(parts) == [(call.name, call.arguments, True) for call in calls]
    assert content in ("", "Sure.")
    assert (row(name).head is None) == (name in ("qwen3_coder", "pythonic"))
    if size == 1 and name == "qwen3_coder":
        # An argument when it is complete: it may be anything.
        assert [part.arguments for part in parts] == ["{", '"city": ', '"Rome"', ', "days": ', "3", "}"]
    if size == 1 and row(name).head is not None:
        assert len(parts) == sum(len(call.arguments) for call in calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_are_told_as_they_are_written(size: int) -> None:
    text = f'{HEAD}{VERBATIM}, "id": 3}}\n</tool_call> and more'
    content, parts = parts_of(stream(), text, size)
    assert put_together(parts) == [("get_weather", VERBATIM, True)]
    assert content == " and more"


@pytest.mark.parametrize("size", [1, 1000])
def test_call_that_is_cut_has_the_arguments_so_far(size: int) -> None:
    for text in (f'{HEAD}{{"city": "Ro', f'{HEAD}{{"city": "Ro</tool_call>'):
        content, parts = parts_of(stream(), text, size)
        assert put_together(parts) == [("get_weather", '{"city": "Ro', False)]
        assert content == ""


@pytest.mark.parametrize("size", [1, 1000])
def test_arguments_end_where_they_are_no_json_and_the_rest_is_content(size: int) -> None:
    content, parts = parts_of(stream(), f'{HEAD}{{"city": Rome}}}}</tool_call>', size)
    assert put_together(parts) == [("get_weather", '{"city": ', False)]
    assert content == "Rome}}</tool_call>"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"arguments": {}, "name": "clock"}</tool_call>', [("clock", "{}", True)]),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', [("clock", "{}", True)]),
        ('<tool_call>{"name": "clock"}</tool_call>', [("clock", "{}", True)]),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "clock", "arguments": [1]}</tool_call>', []),
        (f'<tool_call>{" " * 2000}{{"name": "clock", "arguments": [1]}}</tool_call>', []),
    ],
)
def test_what_is_written_otherwise_is_told_at_its_end(
    text: str, calls: list[tuple[str, str, bool]], size: int
) -> None:
    content, parts = parts_of(stream(), text, size)
    assert put_together(parts) == calls
    assert content == ("" if calls else text)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v31"])
@pytest.mark.parametrize("size", [1, 1000])
def test_one_call_at_most_without_parallel_calls(name: str, size: int) -> None:
    content, parts = parts_of(stream(name, is_parallel=False), TEXTS[name][0], size)
    assert put_together(parts) == [("get_weather", '{"city": "Rome"}', True)]
    assert content in ("", "Sure.")


@pytest.mark.parametrize("size", [1, 1000])
def test_call_behind_one_that_was_told_may_be_of_another_form(size: int) -> None:
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": "{}"}'
    content, parts = parts_of(stream("mistral"), text, size)
    assert (content, put_together(parts)) == ("", [("clock", "{}", True)] * 2)
    lost, parts = parts_of(stream("mistral"), text.replace('"{}"', "1"), size)
    assert put_together(parts) == [("clock", "{}", True)]
    assert lost == ', {"name": "clock", "arguments": 1}'


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in FORMATS])
@pytest.mark.parametrize("filler", [" ", "\n", "[", "[ARGS]", '{"name":', "a", "\\"])
def test_nothing_that_a_model_writes_makes_it_slow(name: str, filler: str) -> None:
    head = HEAD.removeprefix("<tool_call>\n") + '{"city": "'
    for before in ("", head):
        body = before + filler * (30_000 // len(filler))
        parser = stream(name)
        started = time.process_time()
        parts_of(parser, row(name).opening + body, 10)
        assert time.process_time() - started < 2


def random_json(source: random.Random, depth: int) -> object:
    kind = source.randrange(7 if depth else 5)
    if kind == 5:
        return [random_json(source, depth - 1) for _ in range(source.randrange(3))]
    if kind == 6:
        return {f"k\\{index}é": random_json(source, depth - 1) for index in range(source.randrange(3))}
    return (None, source.random() < 0.5, source.uniform(-1e9, 1e-9), source.randrange(-99, 99), 'a"\n/\x01')[
        kind
    ]


@pytest.mark.parametrize("seed", range(20))
def test_prefix_agrees_with_json_about_every_beginning_and_every_changed_text(seed: int) -> None:
    source = random.Random(seed)
    text = json.dumps({"a": random_json(source, 3)}, indent=source.choice([None, 1]))
    for end in range(len(text) + 1):
        prefix = JsonPrefix()
        assert (prefix.push(text[:end] + ("~" if end == len(text) else "")), prefix.is_broken) == (end, False)
        assert prefix.is_whole == (end == len(text))
    for _ in range(300):
        place = source.randrange(1, len(text))  # A call's arguments begin with a bracket.
        changed = text[:place] + source.choice('{}[]",:0-+.eE\\utn \t~') + text[place + source.randrange(2) :]
        prefix = JsonPrefix()
        prefix.push(changed)
        try:
            _, length = json.JSONDecoder(parse_constant=lambda name: 1 / 0).raw_decode(changed)
        except (ValueError, ZeroDivisionError):
            assert not prefix.is_whole
        else:
            assert prefix.is_whole and JsonPrefix().push(changed) == length


@pytest.mark.parametrize(
    "text", ['{"a":01', '{"a":-,', '{"a":1.}', '{"a":1e}', '{"a":nul}', '["\\x', '["\\u00g', "[1,]", "{,"]
)
def test_prefix_tells_the_character_that_breaks(text: str) -> None:
    prefix = JsonPrefix()
    assert (prefix.push(text + " "), prefix.is_broken) == (len(text) - 1, True)
