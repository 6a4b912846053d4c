"""Calls written as Python, in a stream: strings as they are written, others whole, and what breaks off."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from specray.serving.tools.answer import AnswerParser
from specray.serving.tools.reader import MAX_CALL_LEN
from tests.unit.serving.tools.test_call_stream import parts_of, put_together
from tests.unit.serving.tools.test_tools import CLOCK, WEATHER, row, use


def stream(*, is_parallel: bool | None = None, tells_parts: bool = True) -> AnswerParser:
    return AnswerParser(use(None, (WEATHER, CLOCK), is_parallel), row("pythonic"), tells_parts=tells_parts)


def test_arguments_are_told_as_they_are_written() -> None:
    _, parts = parts_of(stream(), "[get_weather(city='R\\nm', days=[1, 2])]", 1)
    assert [part.arguments for part in parts] == [
        *("{", '"city": "', "R", "\\n", "m", '"', ', "days": ', "[1, 2]", "}")
    ]
    assert [part.is_last for part in parts] == [False] * 8 + [True]


VALUES: list[Any] = [
    *("", "a", "it's", 'say "x"', "é🎉\n\t\\", "a, b)", "]}", "\x00\x07", "\\", "\\'", "\\x41", "'''"),
    *(0, -7, 1.5, True, None, [], [1, "a,)", {"k": [None]}], {"a": "b"}),
]


def literal(value: Any, rng: random.Random) -> str:
    """The value as one of Python's ways of writing it."""
    if isinstance(value, str) and rng.random() < 0.5:
        return '"' + value.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    return repr(value)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_size_are_what_is_read_in_one(seed: int) -> None:
    rng = random.Random(seed)
    arguments = {key: rng.choice(VALUES) for key in ("city", "days", "ünits")[: rng.randint(0, 3)]}
    written = rng.choice((", ", ",", " ,\n ")).join(
        f"{key}{rng.choice(('=', ' = '))}{literal(value, rng)}" for key, value in arguments.items()
    )
    answer = f" [get_weather({written}){rng.choice((', ', ','))}clock( )]" + rng.choice(("", "\n"))
    whole = parts_of(stream(tells_parts=False), answer, 10**6)[1]
    assert json.loads(whole[0].arguments) == arguments
    for size in (1, 2, 3, 10**6, *(rng.randint(4, 40) for _ in range(4))):
        content, parts = parts_of(stream(), answer, size)
        called = [("get_weather", whole[0].arguments, True), ("clock", "{}", True)]
        assert (content, put_together(parts)) == ("", called)
        _, parts = parts_of(stream(is_parallel=False), answer, size)
        assert put_together(parts) == called[:1]


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'\x41\u00e9\U0001f389\N{BULLET}'", "Aé🎉•"),
        (r"'\0\101\1018\7'", "\0AA8\7"),
        (r"'\d\ \\d'", r"\d\ \d"),
        ("'a\\\nb'", "ab"),
        ("'''it's'''[0:0]", None),
    ],
)
def test_escapes_are_read_as_python_reads_them(text: str, value: str | None, size: int) -> None:
    content, parts = parts_of(stream(), f"[get_weather(city={text})]", size)
    [(name, arguments, is_complete)] = put_together(parts)
    assert (name, is_complete) == ("get_weather", value is not None)
    if value is not None:
        assert (json.loads(arguments), content) == ({"city": value}, "")


def test_half_a_surrogate_pair_is_told_as_an_escape() -> None:
    _, parts = parts_of(stream(), "[get_weather(city='a\\ud83d')]", 1000)
    [(_, arguments, _)] = put_together(parts)
    assert arguments == '{"city": "a\\ud83d"}'


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("get_weather(city='Ro", '{"city": "Ro'),
        ("get_weather(city='Ro\nme')", '{"city": "Ro'),
        ("get_weather(city='a', city='b')", '{"city": "a"'),
        ("get_weather(city='a' days=1)", '{"city": "a'),
        ("get_weather(city='a' % 1)", '{"city": "a'),
        ("get_weather(city='abc\\U00ffffff')", '{"city": "abc'),
        ("get_weather(days=,)", '{"days": '),
        ("get_weather(days=#\n)", '{"days": '),
        ("get_weather(days=other)", '{"days": '),
        ("get_weather(days={1})", '{"days": '),
        ("get_weather(days=float)", '{"days": '),
        ("get_weather(days=[1", '{"days": '),
        ("get_weather(city='\\U00ffffff')", '{"city": "'),
        ("get_weather(city='\\N{NO SUCH}')", '{"city": "'),
    ],
)
def test_a_call_that_breaks_off_has_the_arguments_so_far(body: str, told: str, size: int) -> None:
    _, parts = parts_of(stream(), f"[{body}", size)
    assert put_together(parts) == [("get_weather", told, False)]


AGREED: list[tuple[str, list[dict[str, Any]], str]] = [
    ("get_weather(from='a', to='b')]", [{"from": "a", "to": "b"}], ""),
    (
        "get_weather(city='''it's ''so''\n''', days=\"\"\"a\"b\"\"\")]",
        [{"city": "it's ''so''\n", "days": 'a"b'}],
        "",
    ),
    ("get_weather(city='''\\'''')]", [{"city": "'"}], ""),
    ("get_weather(city='a' 'b'\n \"c\" '')]", [{"city": "abc"}], ""),
    ("get_weather(city='', days=r'\\d' 'e')]", [{"city": "", "days": "\\de"}], ""),
    ("get_weather(days=['''a']''', '', \"it's\"])]", [{"days": ["a']", "", "it's"]}], ""),
    (
        "get_weather( # it's\n city='a', # don't\n days=[1, # it's\n 2] # isn't\n)]",
        [{"city": "a", "days": [1, 2]}],
        "",
    ),
    ("get_weather(city='a' # it's\n 'b',)]", [{"city": "ab"}], ""),
    ("get_weather(days=-\n1) , get_weather()\n, ]\n", [{"days": -1}, {}], ""),
    ("get_weather() get_weather()]", [{}], " get_weather()]"),
    ("get_weather(), , get_weather()]", [{}], ", , get_weather()]"),
    ("get_weather(), unknown()]", [{}], ", unknown()]"),
    ("get_weather()", [{}], ""),
    ("get_weather(), get_wea", [{}], ", get_wea"),
    ("get_weather(days={'a': true, 'b': [null, false]})]", [{"days": {"a": True, "b": [None, False]}}], ""),
    ("get_weather()] and more", [{}], " and more"),
    (
        "get_weather(days=(1, 2)), get_weather(days={'a': None})]",
        [{"days": [1, 2]}, {"days": {"a": None}}],
        "",
    ),
]


@pytest.mark.parametrize(("body", "arguments", "content"), AGREED)
def test_an_answer_has_the_same_calls_whole_and_in_any_pieces(
    body: str, arguments: list[dict[str, Any]], content: str
) -> None:
    for size in range(1, len(body) + 2):
        for tells_parts in (False, True):
            found, parts = parts_of(stream(tells_parts=tells_parts), f"[{body}", size)
            calls = put_together(parts)
            assert [(name, is_complete) for name, _, is_complete in calls] == [("get_weather", True)] * len(
                calls
            )
            assert [json.loads(each) for _, each, _ in calls] == arguments
            assert found == content


PIECES = (
    "get_weather(",
    "clock(",
    ")",
    ", ",
    "city=",
    "days=",
    "'",
    '"',
    "'''",
    "\\",
    "\n",
    "# it's\n",
    "#",
    "a",
    "]",
    "[",
    "1",
    " ",
    "{",
    "}",
    "\\x4",
)


@pytest.mark.parametrize("seed", range(200))
def test_any_text_has_the_same_complete_calls_whole_and_in_pieces(seed: int) -> None:
    rng = random.Random(seed)
    text = "[get_weather(" + rng.choice(("city='", "days=[", "", "city='''"))
    text += "".join(rng.choices(PIECES, k=rng.randint(1, 12))) + rng.choice(
        ("", "')", "]), clock()]", "'''), clock()")
    )
    content, parts = parts_of(stream(tells_parts=False), text, len(text))
    whole = put_together(parts)
    in_one = parts_of(stream(), text, len(text))
    streamed = put_together(in_one[1])
    assert [call for call in streamed if call[2]] == whole
    if len(streamed) == len(whole):
        assert content == in_one[0]
    else:
        # Where a call was told, the space at the end of an answer is none of its content.
        assert content.rstrip().endswith(in_one[0])
    for size in (1, 2, 3, 5, 8):
        for tells_parts, expected in ((False, (content, whole)), (True, (in_one[0], streamed))):
            found, parts = parts_of(stream(tells_parts=tells_parts), text, size)
            assert (found, put_together(parts)) == expected


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_breaks_off_after_a_complete_one_is_content_of_a_whole_answer(size: int) -> None:
    content, parts = parts_of(stream(tells_parts=False), "[clock(), get_weather(city='Ro", size)
    assert (content, put_together(parts)) == (", get_weather(city='Ro", [("clock", "{}", True)])


@pytest.mark.slow
def test_a_whole_answer_of_many_arguments_is_read_in_time() -> None:
    arguments = {f"a{index}": 1 for index in range(20_000)}
    answer = "[get_weather(" + ",".join(f"{key}=1" for key in arguments) + ")]"
    parser = stream(tells_parts=False)
    started = time.process_time()
    _, parts = parts_of(parser, answer, len(answer))
    assert time.process_time() - started < 5
    assert json.loads(parts[0].arguments) == arguments


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "body", ["unknown(a=1)]", "get_weather(1)]", "get_weather(,)]", "get_weather(*x)]", "get_weather"]
)
def test_what_is_no_call_is_content(body: str, size: int) -> None:
    assert parts_of(stream(), f"[{body}", size) == (f"[{body}", [])


@pytest.mark.parametrize("value", ["'" + "7" * MAX_CALL_LEN, "[" + "7," * MAX_CALL_LEN])
def test_a_call_that_is_too_long_breaks_off(value: str) -> None:
    _, parts = parts_of(stream(), f"[get_weather(days={value}", 4096)
    [(name, arguments, is_complete)] = put_together(parts)
    assert (name, is_complete) == ("get_weather", False)
    assert len(arguments) <= MAX_CALL_LEN + 5000
