"""Whatever a model writes: cut at any places it is read alike, and none of it is lost or told twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specray.serving.tools.answer import AnswerParser
from specray.serving.tools.formats import FORMATS
from tests.unit.serving.tools.test_call_stream import put_together
from tests.unit.serving.tools.test_tools import row, use

PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "n": {"type": "integer"},
        "e": {"enum": ["a", "b"]},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
PIECES = (
    *("f", "g", "h", "s", "u", "n", "e", "a", "1", "null", "None", "True", "é", " ", "\n", "\t", "x y"),
    *(
        '"',
        "'",
        "\\",
        "\\n",
        "\\u00",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "(",
        ")",
        "=",
        "```",
        "```json\n",
        "<",
        ">",
    ),
    *('{"name": "f", "arguments": ', '{"name": "g"', '"s": "', '{"s": "a"}', "}}", "{}", 'f(s="a"', ", g()"),
    *(
        "<function=f>\n",
        "<parameter=s>\n",
        "\n</parameter>\n",
        "</parameter>",
        "</function>",
        "<parameter=n>",
    ),
    *("<arg_key>s</arg_key>", "<arg_value>", "</arg_value>", '<invoke name="f">', '<parameter name="s">'),
    *("</invoke>", "functions.f:0", "<think>", "</think>", "<|tool_call_argument_begin|>", ":0"),
)
NAMES = [entry.name for entry in FORMATS]


def texts(name: str) -> st.SearchStrategy[str]:
    entry = row(name)
    own = (*entry.starts, *entry.markers, entry.bare, entry.begin, entry.end, entry.between)
    calls = [
        f"{entry.begin}{entry.before_name}{tool}{entry.after_name}{body}{entry.after}{entry.end}"
        for tool in ("f", "g")
        for body in _bodies(name)
    ]
    return st.lists(st.sampled_from((*PIECES, *own, *own, *calls)), max_size=14).map("".join)


def _bodies(name: str) -> list[str]:
    """Arguments as a format writes them, which hold its own tags."""
    entry = row(name)
    value = f"a{(*entry.starts, *entry.markers, '</parameter>')[-1]}b"
    if entry.writes_parameters:
        return ["", f"{entry.before_key}s{entry.after_key}{value}{entry.after_value}"]
    return [f"s={value!r}"] if name == "pythonic" else ["{}", json.dumps({"s": value})]


def read(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    deltas = [*(parser.push(piece) for piece in pieces), parser.finish()]
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return content, reasoning, put_together([call for delta in deltas for call in delta.calls])


def parser(name: str, *, tells_parts: bool, reads_reasoning: bool) -> AnswerParser:
    return AnswerParser(use(None, TOOLS), row(name), tells_parts=tells_parts, reads_reasoning=reads_reasoning)


def bare(text: str) -> str:
    """A text without whitespace, which may belong to the format."""
    return "".join(text.split())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), reads_reasoning=st.booleans())
def test_any_text_is_read_alike_however_it_is_cut(
    name: str, data: st.DataObject, reads_reasoning: bool
) -> None:
    text = data.draw(texts(name))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = {}
    for tells_parts in (False, True):
        readings = [
            read(parser(name, tells_parts=tells_parts, reads_reasoning=reads_reasoning), cut)
            for cut in ([text], pieces, list(text))
        ]
        assert readings[0] == readings[1] == readings[2]
        found[tells_parts] = readings[0]
    whole, streamed = found[False], found[True]
    assert [call for call in streamed[2] if call[2]] == whole[2]
    for _, arguments, _ in whole[2]:
        assert isinstance(json.loads(arguments), dict)
    if len(streamed[2]) == len(whole[2]):
        # No call broke off.
        assert (bare(streamed[0]), bare(streamed[1])) == (bare(whole[0]), bare(whole[1]))
    if not streamed[2] and not reads_reasoning:
        assert whole[0] == text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_text_before_and_after_a_call_stays_and_the_call_is_read(name: str, data: st.DataObject) -> None:
    entry = row(name)
    words = st.text(st.sampled_from("ab<>_ .\n"), max_size=12)
    before = "" if entry.bare else data.draw(words)
    after = data.draw(words)
    body = data.draw(st.sampled_from(_bodies(name)))
    call = f"{entry.begin}{entry.before_name}f{entry.after_name}{body}{entry.after}{entry.end}"
    content, _, calls = read(
        parser(name, tells_parts=data.draw(st.booleans()), reads_reasoning=False), [before + call + after]
    )
    assert [(tool, is_complete) for tool, _, is_complete in calls] == [("f", True)]
    assert bare(content) == bare(before + after)
    assert json.loads(calls[0][1]) in ({}, {"s": f"a{(*entry.starts, *entry.markers, '</parameter>')[-1]}b"})
