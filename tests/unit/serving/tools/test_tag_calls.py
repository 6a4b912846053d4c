"""Arguments between tags, in a stream: strings as they are written, others whole, and what breaks off."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from specray.serving.tools.answer import AnswerParser
from specray.serving.tools.parameter_value import ParameterSchema
from specray.serving.tools.reader import MAX_CALL_LEN
from tests.unit.serving.tools.test_call_stream import parts_of, put_together
from tests.unit.serving.tools.test_tools import CLOCK, row, use

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "mode": {"type": "integer"},
            },
        },
    },
}
TEXT = 'if a < b and c == "</div>":\n\tprint("\\\\ü")\n\n</par'


def stream(*, is_parallel: bool | None = None, tells_parts: bool = True) -> AnswerParser:
    tools = use(None, (WRITE, CLOCK), is_parallel)
    return AnswerParser(tools, row("qwen3_coder"), tells_parts=tells_parts)


def written(name: str, arguments: dict[str, str], *, end: str = "</function>\n") -> str:
    """A call as a template of Qwen3-Coder shows it."""
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}{end}</tool_call>"


def test_a_string_is_told_as_it_is_written() -> None:
    _, parts = parts_of(stream(), written("write", {"text": 'a"\n<b>'}), 1)
    assert [part.arguments for part in parts] == ["{", '"text": "', "a", '\\"', "\\n<b", ">", '"', "}"]
    assert [part.is_last for part in parts] == [False] * 7 + [True]


@pytest.mark.parametrize("text", [TEXT, "", "\n", "\n\n", "<", "</parameter", "a\n</parameter\n"])
def test_pieces_of_any_size_are_what_is_read_in_one(text: str) -> None:
    answer = written("write", {"path": "x.py", "text": text, "mode": "7"}) + " done"
    whole = parts_of(stream(tells_parts=False), answer, 10**6)[1]
    assert json.loads(whole[0].arguments) == {"path": "x.py", "text": text, "mode": 7}
    rng = random.Random(0)
    for size in (1, 2, 3, 10**6, *(rng.randint(4, 40) for _ in range(6))):
        content, parts = parts_of(stream(), answer, size)
        assert put_together(parts) == [("write", whole[0].arguments, True)]
        assert content == " done"


@pytest.mark.parametrize("size", [1, 1000])
def test_several_calls_are_told_or_only_the_first(size: int) -> None:
    answer = written("write", {"path": "a"}) + "\n" + written("clock", {})
    _, parts = parts_of(stream(), answer, size)
    assert put_together(parts) == [("write", '{"path": "a"}', True), ("clock", "{}", True)]
    _, parts = parts_of(stream(is_parallel=False), answer, size)
    assert put_together(parts) == [("write", '{"path": "a"}', True)]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_without_its_closing_tag_ends_with_its_region(size: int) -> None:
    content, parts = parts_of(stream(), written("write", {"path": "a"}, end=""), size)
    assert (content, put_together(parts)) == ("", [("write", '{"path": "a"}', True)])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("body", "told", "rest"),
    [
        ("<function=write>\n<parameter=path>\na/b", '{"path": "a/b', ""),
        ("<function=write>\n<parameter=mode>\n7", '{"mode": ', "\n7"),
        ("<function=write>\n<parameter=mode>\nNaN\n</parameter>\n", '{"mode": "NaN"', ""),
        (
            "<function=write>\n<parameter=mode>\n7\n</parameter>\nwhat?",
            '{"mode": ',
            "\n7\n</parameter>\nwhat?",
        ),
    ],
)
def test_a_call_that_breaks_off_has_the_arguments_so_far(body: str, told: str, rest: str, size: int) -> None:
    content, parts = parts_of(stream(), f"<tool_call>\n{body}", size)
    assert put_together(parts) == [("write", told, False)]
    assert content == rest.rstrip("\n")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "body", ["<function=unknown>\n</function>\n", "<function=write> is a call", "no call", "x" * 2000]
)
def test_what_is_no_call_is_content(body: str, size: int) -> None:
    answer = f"<tool_call>\n{body}</tool_call>"
    assert parts_of(stream(), answer, size) == (answer, [])


@pytest.mark.parametrize("key", ["text", "mode"])
def test_a_call_that_is_too_long_breaks_off(key: str) -> None:
    _, parts = parts_of(stream(), written("write", {key: "7" * (MAX_CALL_LEN + 10)}), 4096)
    [(name, arguments, is_complete)] = put_together(parts)
    assert (name, is_complete) == ("write", False)
    assert len(arguments) <= MAX_CALL_LEN + 5000


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ({"$ref": "#/$defs/count"}, 5),
        ({"$ref": "#count"}, 5),
        ({"$ref": "#/$defs/either/anyOf/0"}, 5),
        ({"$ref": "#/$defs/a~1b%20c"}, "5"),
        ({"$ref": "#/$defs/missing"}, 5),
        ({"$ref": "#/$defs/missing", "type": "string"}, "5"),
        ({"$ref": "other.json", "type": "string"}, "5"),
        ({"$ref": "#/properties/p"}, 5),
    ],
    ids=lambda case: str(case.get("$ref")) if isinstance(case, dict) else "",
)
def test_a_value_is_typed_by_the_schema_that_its_reference_finds(
    reference: dict[str, Any], value: object
) -> None:
    definitions = {
        "count": {"$anchor": "count", "type": "integer"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "a/b c": {"type": "string"},
    }
    assert (
        json.loads(ParameterSchema({"$defs": definitions, "properties": {"p": reference}}, "p").json("5"))
        == value
    )
