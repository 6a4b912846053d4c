"""Calls in a stream: arguments in pieces of any size, cut where they break off, and what is no call."""

from __future__ import annotations

import json
import random
import time

import pytest
import regex

from specray.serving.tools.answer import AnswerParser, CallDelta
from specray.serving.tools.formats import FORMATS
from specray.serving.tools.json_text import JsonText
from tests.unit.serving.tools.test_tools import CLOCK, TEXTS, WEATHER, opening, row, use

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
    if size == 1 and name == "qwen3_coder":
        # An argument when it is complete: it may be anything.
        assert [part.arguments for part in parts] == ["{", '"city": ', '"Rome"', ', "days": ', "3", "}"]
    if size == 1 and name == "hermes":
        assert [part.arguments for part in parts if part.index == 0] == [*'{"city": "Rome"}']


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_are_told_as_they_are_written(size: int) -> None:
    text = f'{HEAD}{VERBATIM}, "id": 3}}\n</tool_call> and more'
    content, parts = parts_of(stream(), text, size)
    assert put_together(parts) == [("get_weather", VERBATIM, True)]
    assert content == " and more"


@pytest.mark.parametrize("size", [1, 1000])
def test_call_that_is_cut_has_the_arguments_so_far(size: int) -> None:
    for end in ("", "</tool_call>"):
        content, parts = parts_of(stream(), f'{HEAD}{{"city": "Ro{end}', size)
        assert put_together(parts) == [("get_weather", f'{{"city": "Ro{end}', False)]
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
        parts_of(parser, opening(name) + body, 10)
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
def test_reader_of_json_agrees_with_json_about_every_beginning_and_every_changed_text(seed: int) -> None:
    source = random.Random(seed)
    text = json.dumps({"a": random_json(source, 3)}, indent=source.choice([None, 1]))
    for end in range(len(text) + 1):
        reader = JsonText()
        length, told = reader.push(text[:end] + ("~" if end == len(text) else ""))
        assert (told, reader.is_whole, reader.is_broken) == (text[:length], end == len(text), False)
        # What is not read yet is a part of a number, of a literal, of an escape, or a comma and space.
        assert regex.fullmatch(r"[\w.+-]*|\\u?.{0,3}|,\s*", text[length:end])
    for _ in range(300):
        place = source.randrange(1, len(text))  # A call's arguments begin with a bracket.
        changed = (
            text[:place] + source.choice("{}[]\",:0-+.eE\\utn \t~'") + text[place + source.randrange(2) :]
        )
        try:
            _, length = json.JSONDecoder(parse_constant=lambda name: 1 / 0).raw_decode(changed)
        except (ValueError, ZeroDivisionError):
            continue
        assert JsonText().push(changed) == (length, changed[:length])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{'a': 'it\\'s', \"b\": 'say \"x\"'}", '{"a": "it\'s", "b": "say \\"x\\""}'),
        ("[True, False, None]", "[true, false, null]"),
        ('{"a": 1, }', '{"a": 1 }'),
        ("[1,\n]", "[1\n]"),
        ('"a\n\t\x01\x7f"', '"a\\n\\t\\u0001\x7f"'),
        (r'"\d \u12G4 \x41 C:\dir"', r'"\\d \\u12G4 \\x41 C:\\dir"'),
        (r'"\\ \/ \ud800 \u00e9"', r'"\\ \/ \ud800 \u00e9"'),
    ],
)
def test_what_is_not_json_and_has_one_meaning_is_given_as_json(text: str, told: str) -> None:
    for size in (1, 2, 100):
        reader, waiting, parts = JsonText(), "", list[str]()
        for start in range(0, len(text), size):
            waiting += text[start : start + size]
            length, part = reader.push(waiting)
            waiting = waiting[length:]
            parts.append(part)
        assert (reader.is_whole, waiting, "".join(parts)) == (True, "", told)
        json.loads(told)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ('{"a":01 ', 5),
        ('{"a":-,', 5),
        ('{"a":1.}', 5),
        ('{"a":1e}', 5),
        ('{"a":nul}', 5),
        ('{"a":NaN}', 5),
        ("{,", 1),
        ("[,]", 1),
        ("[}", 1),
        ("{1:2}", 1),
        ("{a:2}", 1),
        ('{"a" 1}', 5),
        ('{"a":1 "b"}', 7),
    ],
)
def test_what_has_no_meaning_is_not_read(text: str, length: int) -> None:
    reader = JsonText()
    assert (reader.push(text)[0], reader.is_broken) == (length, True)
