"""gpt-oss's channels: each part of an answer is told as what it is, in pieces of any size."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specray.serving.tools.answer import AnswerDelta
from specray.serving.tools.harmony.answer import MAX_HEADER_LEN, ChannelReader
from specray.serving.tools.harmony.channels import Channels, Marker
from specray.serving.tools.harmony.forced import forced_channels
from specray.serving.tools.harmony.prompt import ChannelPrompt, PromptEnd
from specray.serving.tools.request import ToolUse, parse_tools

IDS = {marker: index for index, marker in enumerate(Marker, 1)}
CHANNELS = Channels(IDS)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "clock", "a.b-c_d")
]
Read = tuple[str, str, list[tuple[str, str]]]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CLOCK: Read = ("", "", [("clock", "{}")])
ROME = '{"city": "Rome"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}"


def use(choice: Any = None, is_parallel: bool | None = None) -> ToolUse:
    found = parse_tools(TOOLS, choice, is_parallel)
    assert found is not None
    return found


def tokens(text: str, size: int) -> Iterator[tuple[int, str]]:
    """A text as tokens: control tokens, and between them pieces of a size."""
    for part in re.split(f"({'|'.join(map(re.escape, Marker))})", text):
        if part in IDS:
            yield IDS[Marker(part)], part
            continue
        for start in range(0, len(part), size):
            yield 1000, part[start : start + size]


def read(
    text: str,
    size: int = 3,
    *,
    tools: ToolUse | None = None,
    opened: str = "<|start|>assistant",
    tells_parts: bool = False,
) -> Read:
    reader = ChannelReader(CHANNELS, tools, opened=list(tokens(opened, 4)), tells_parts=tells_parts)
    deltas = [reader.push(piece, token_id) for token_id, piece in tokens(text, size)]
    return joined([*deltas, reader.finish()])


def joined(deltas: Sequence[AnswerDelta]) -> Read:
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.is_first:
            assert call.index == len(calls)
            calls.append((call.name, ""))
        calls[call.index] = (call.name, calls[call.index][1] + call.arguments)
    content = "".join(delta.content for delta in deltas)
    return content, "".join(delta.reasoning for delta in deltas), calls


@pytest.mark.parametrize("tells_parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + "We need 2+2." + NEXT + FINAL + "4", ("4", "We need 2+2.", [])),
        (ANALYSIS + "Hm." + NEXT + CALL, ("", "Hm.", [("get_weather", ROME)])),
        (
            "<|channel|>commentary<|message|>I look." + NEXT + CALL,
            ("I look.", "", [("get_weather", ROME)]),
        ),
        (
            f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}",
            ("", "", [("get_weather", ROME)]),
        ),
        (
            f" to=functions.get_weather<|channel|>analysis <|constrain|>json<|message|>{ROME}",
            ("", "", [("get_weather", ROME)]),
        ),
        (f"{CALL}{NEXT} to=functions.clock<|channel|>commentary<|message|>{{}}",
         ("", "", [("get_weather", ROME), ("clock", "{}")])),
        (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>",
         ("", "", [("get_weather", ROME), ("get_weather", ROME)])),
        ("<|channel|>commentary to=functions.a.b-c_d<|message|>{}", ("", "", [("a.b-c_d", "{}")])),
        ("<|channel|>commentary to=clock<|message|>{}", ("", "", [("clock", "{}")])),
        ("<|channel|>commentary functions.clock<|message|>{}", ("", "", [("clock", "{}")])),
        ("<|channel|>commentary to=functions.clockjson<|message|>{}", ("", "", [("clock", "{}")])),
        ("<|channel|>commentary to=functions.clock<|constrain|>json<|message|>\n{}\n",
         ("", "", [("clock", "{}")])),
        ("<|channel|>final <|constrain|>json<|message|>[1]", ("[1]", "", [])),
        (FINAL + " a \n<|return|>", (" a \n", "", [])),
        (FINAL + "a < b <|end", ("a < b <|end", "", [])),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_each_message_is_what_its_channel_says(
    text: str, expected: Read, size: int, tells_parts: bool
) -> None:
    assert read(text, size, tools=use(), tells_parts=tells_parts) == expected
    for end in ("<|return|>", "<|call|>", "<|end|>"):
        assert (
            read(text.removesuffix("<|call|>").removesuffix("<|return|>") + end, size, tools=use())
            == expected
        )


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # No header, or a part of one.
        ("Hello", ("Hello", "", [])),
        ("to be", ("to be", "", [])),
        ("assistants", ("assistants", "", [])),
        ("<|message|>Hello", ("Hello", "", [])),
        ("<|channel|><|message|>Hello", ("Hello", "", [])),
        ("<|channel|>other<|message|>Hello", ("Hello", "", [])),
        ("<|channel|>final Hello there<|return|>", ("Hello there", "", [])),
        ("<|channel|>final Hello there", ("Hello there", "", [])),
        ("<|channel|>analysis Hm so.<|end|><|start|>assistant" + FINAL + "4", ("4", "Hm so.", [])),
        ("<|channel|>commentary to=functions.clock json{}<|call|>", ("", "", [("clock", "{}")])),
        ("<|channel|>commentary to=functions.clock<|call|>", ("", "", [("clock", "{}")])),
        ("<|channel|>commentary to=functions.clock<|message|><|call|>", ("", "", [("clock", "{}")])),
        ("<|channel|>commentary to=functions.clock<|message|>null<|call|>", ("", "", [("clock", "{}")])),
        # Repeated and misspelt headers.
        ("<|start|>assistant" + FINAL + "4", ("4", "", [])),
        ("assistant" + FINAL + "4", ("4", "", [])),
        ("<|start|>assistantassistant" + FINAL + "4", ("4", "", [])),
        ("<|channel|>commentary to=assistant" + ANALYSIS + "Hm." + NEXT + FINAL + "4", ("4", "Hm.", [])),
        ("<|channel|>I will do<|end|><|start|>assistant" + FINAL + "4", ("I will do\n4", "", [])),
        ("<|channel|>final to=user<|message|>4", ("4", "", [])),
        ("<|channel|>commentary to=all<|message|>4", ("4", "", [])),
        ("<|channel|>analysis??<|message|>Hm." + NEXT + FINAL + "4", ("4", "Hm.", [])),
        ("<|channel|>––commentary<|message|>Hm.", ("Hm.", "", [])),
        # An end or a start that is missing.
        (ANALYSIS + "Hm." + FINAL + "4", ("4", "Hm.", [])),
        (ANALYSIS + "Hm.<|start|>assistant" + FINAL + "4", ("4", "Hm.", [])),
        (ANALYSIS + "Hm.<|end|>" + FINAL + "4", ("4", "Hm.", [])),
        (ANALYSIS + "Hm.<|end|>4", ("4", "Hm.", [])),
        (ANALYSIS + "Hm.<|end|>\n<|start|>assistant" + FINAL + "4", ("4", "Hm.", [])),
        # Several messages of a kind.
        (ANALYSIS + "a" + NEXT + ANALYSIS + "b" + NEXT + FINAL + "c", ("c", "a\nb", [])),
        ("<|channel|>commentary<|message|>a\n" + NEXT + FINAL + "b", ("a\nb", "", [])),
        # Cut outputs.
        ("", ("", "", [])),
        ("<|channel|>", ("", "", [])),
        ("<|channel|>ana", ("", "", [])),
        ("<|channel|>commentary to=functions.cl", ("", "", [])),
        ("<|channel|>commentary to=functions.clock", ("", "", [])),
        ("<|channel|>commentary t", ("", "", [])),
        (ANALYSIS + "Hm." + NEXT, ("", "Hm.", [])),
        (ANALYSIS + "Hm.<|end|><|start|>assis", ("", "Hm.", [])),
        (ANALYSIS, ("", "", [])),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_breaks_the_format_is_not_lost(text: str, expected: Read, size: int) -> None:
    assert read(text, size, tools=use()) == expected
    assert read(text, size, tools=use(), tells_parts=True) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}",
        "<|channel|>commentary to=functions.clock<|message|>[1]",
        "<|channel|>commentary to=functions.clock<|message|>not JSON",
        "<|channel|>commentary to=python code<|message|>print(1)",
        "<|start|>user<|message|>What else?",
        "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon",
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_is_no_call_of_a_tool_is_text_as_it_was_written(text: str, size: int) -> None:
    content = text.removeprefix("<|start|>")
    assert read(text + "<|end|>", size, tools=use()) == (content, "", [])
    assert read(text, size, tools=use(), tells_parts=True) == (content, "", [])


def test_calls_are_text_where_none_are_read() -> None:
    assert read(CALL) == (CALL, "", [])
    assert read(CALL, tools=use("none")) == (CALL, "", [])
    choice = {"type": "function", "function": {"name": "clock"}}
    assert read(CALL, tools=use(choice)) == (CALL, "", [])


def test_builtin_tools_of_the_analysis_are_reasoning() -> None:
    text = "<|channel|>analysis to=python code<|message|>print(1)"
    assert read(text + NEXT + FINAL + "4", tools=use()) == ("4", text, [])


def test_text_that_spells_control_tokens_is_text() -> None:
    reader = ChannelReader(CHANNELS, use())
    deltas = [reader.push(piece, token_id) for token_id, piece in tokens(FINAL, 9)]
    spelt = "<|end|><|start|>assistant<|channel|>analysis<|message|>x<|return|>"
    deltas += [reader.push(char, 1000) for char in spelt]
    deltas.append(reader.push("<|return|>", IDS[Marker.RETURN]))
    assert joined(deltas) == (spelt, "", [])


def test_control_tokens_that_were_held_back_are_read_where_they_come() -> None:
    reader = ChannelReader(CHANNELS, use())
    held: list[tuple[str, int]] = [
        ("", IDS[Marker.START]),
        ("", 1000),
        ("", IDS[Marker.CHANNEL]),
        ("<|start|>assistant<|channel|>final", 1000),
        ("<|message|>4", IDS[Marker.MESSAGE]),
        ("", IDS[Marker.RETURN]),
    ]
    deltas = [reader.push(text, token_id) for text, token_id in held]
    assert joined([*deltas, reader.finish()]) == ("4", "", [])


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        ("<|start|>assistant" + ANALYSIS, "Hm." + NEXT + FINAL + "4", ("4", "Hm.", [])),
        ("<|start|>assistant" + FINAL + "It is", " 4", (" 4", "", [])),
        ("<|start|>assistant<|channel|>", "final<|message|>4", ("4", "", [])),
        ("<|start|>assistant<|channel|>fin", "al<|message|>4", ("4", "", [])),
        ("<|start|>assistant to=functions.clock", "<|channel|>commentary<|message|>{}", CLOCK),
        ("<|start|>assistant<|channel|>commentary to=functions.clock<|message|>", "{}", CLOCK),
        ("<|start|>", "assistant" + FINAL + "4", ("4", "", [])),
        ("", "<|start|>assistant" + FINAL + "4", ("4", "", [])),
    ],
    ids=lambda value: value[-30:] if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 1000])
def test_reading_goes_on_where_the_prompt_ends(opened: str, text: str, expected: Read, size: int) -> None:
    assert read(text, size, tools=use(), opened=opened) == expected
    assert read(text, size, tools=use(), opened=opened, tells_parts=True) == expected


def test_arguments_are_given_as_they_are_written() -> None:
    reader = ChannelReader(CHANNELS, use(), tells_parts=True)
    gained = [
        call
        for token_id, piece in tokens(CALL, 5)
        for call in reader.push(piece, token_id).calls
    ]  # fmt: skip
    assert [call.arguments for call in gained] == ['{"cit', 'y": "', 'Rome"', "}"]
    assert [call.is_first for call in gained] == [True] + [False] * (len(gained) - 1)
    assert [call.is_last for call in gained] == [False] * (len(gained) - 1) + [True]
    assert len({call.call_id for call in gained}) == 1


def test_call_that_is_cut_is_text_whole_and_a_call_in_parts() -> None:
    text = CALL.removesuffix('me"}')
    assert read(text, tools=use()) == (text, "", [])
    assert read(text, tools=use(), tells_parts=True) == ("", "", [("get_weather", '{"city": "Ro')])


def test_text_after_the_arguments_is_content() -> None:
    for tells_parts in (False, True):
        content, _, calls = read(CALL + " done", tools=use(), tells_parts=tells_parts)
        assert (content, calls) == ("done", [("get_weather", ROME)])


@pytest.mark.parametrize("tells_parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ('{"a": "<|end|> }"}', '{"a": "<|end|> }"}'),
        ('{"a": True, "b": [1,],}', '{"a": true, "b": [1]}'),
        ("{'a': None}", '{"a": null}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("null", "{}"),
        (" \n", "{}"),
    ],
)
def test_arguments_are_json_as_models_write_it(
    body: str, arguments: str, size: int, tells_parts: bool
) -> None:
    reader = ChannelReader(CHANNELS, use(), tells_parts=tells_parts)
    head = "<|channel|>commentary to=functions.clock<|message|>"
    deltas = [reader.push(piece, token_id) for token_id, piece in tokens(head, size)]
    deltas += [reader.push(body[start : start + size]) for start in range(0, len(body), size)]
    assert joined([*deltas, reader.finish()]) == ("", "", [("clock", arguments)])


@pytest.mark.parametrize("filler", ["a", " "])
def test_nothing_that_a_model_writes_makes_reading_slow(filler: str) -> None:
    reader = ChannelReader(CHANNELS, use(), opened=list(tokens(CALL.removesuffix(ROME), 1000)))
    started = time.process_time()
    body = '{"a": "' + filler * (400_000 // len(filler))
    deltas = [reader.push(body[start : start + 4]) for start in range(0, len(body), 4)]
    content, _, calls = joined([*deltas, reader.finish()])
    assert time.process_time() - started < 10
    assert (content.endswith(body), calls) == (True, [])


def test_one_call_is_read_where_one_is_allowed() -> None:
    for tells_parts in (False, True):
        text = f"{CALL}<|call|><|start|>assistant{CALL}"
        got = read(text, tools=use(is_parallel=False), tells_parts=tells_parts)
        assert got == ("", "", [("get_weather", ROME)])


def test_text_is_given_as_it_comes() -> None:
    reader = ChannelReader(CHANNELS, None)
    pieces = [reader.push(piece, token_id) for token_id, piece in tokens(FINAL + "One, two.", 4)]
    assert [delta.content for delta in pieces][-3:] == ["One,", " two", "."]
    assert [reader.push(char).content for char in " a"] == [" ", "a"]


def test_text_without_a_header_is_given_at_once() -> None:
    reader = ChannelReader(CHANNELS, None, opened=list(tokens("<|start|>assistant", 4)))
    assert [reader.push(piece).content for piece in ("to", " be", " or")] == ["", "to be", " or"]


@pytest.mark.parametrize("start", ["", "<|start|>assistant", "<|start|>user", "<|channel|>final"])
def test_header_is_no_longer_than_it_may_be(start: str) -> None:
    reader = ChannelReader(CHANNELS, use())
    deltas = [reader.push(piece, token_id) for token_id, piece in tokens(start + " to=" + "a" * 5000, 100)]
    assert sum(len(delta.content) for delta in deltas) > 5000 - MAX_HEADER_LEN
    content, reasoning, calls = joined([*deltas, reader.finish()])
    assert content.endswith("a" * 5000)
    assert (reasoning, calls) == ("", [])


def test_reasoning_and_headers_are_apart_from_the_text() -> None:
    reader, found = ChannelReader(CHANNELS, use()), list[tuple[str, bool, bool]]()
    for token_id, piece in tokens(ANALYSIS + "Hm." + NEXT + FINAL + "4", 1000):
        reader.push(piece, token_id)
        found.append((piece, reader.is_reasoning, reader.is_apart))
    assert [piece for piece, is_reasoning, _ in found if is_reasoning] == ["<|message|>", "Hm."]
    assert [piece for piece, _, is_apart in found if not is_apart] == ["<|message|>", "4"]


@pytest.mark.parametrize(
    "template", [None, "<|start|><|message|><|end|>", "<|start|><|channel|><|message|>"], ids=str
)
def test_template_of_another_format_has_no_channels(template: str | None) -> None:
    assert Channels.find(template, lambda text: IDS[Marker(text)]) is None


def test_channels_are_control_tokens_of_the_vocabulary() -> None:
    template = "".join(Marker)
    assert Channels.find(template, {str(marker): index for marker, index in IDS.items()}.get) == CHANNELS
    assert Channels.find(template, lambda text: None) is None


PARTS = (
    *(*Marker, *Marker),
    *("assistant", "analysis", "final", "commentary", " to=functions.clock", " to=functions.other", " json"),
    *('{"a": "x y"}', "{}", "null", "Hello", " you", "to", " ", "\n", "user", "<|"),
)


@pytest.mark.parametrize("seed", range(40))
def test_any_text_reads_the_same_in_pieces_of_any_size(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        text = "".join(chance.choice(PARTS) for _ in range(chance.randrange(1, 14)))
        opened = chance.choice(["", "<|start|>assistant", "<|start|>assistant" + ANALYSIS])
        tools = chance.choice([None, use(), use(is_parallel=False)])
        for tells_parts in (False, True):
            found = [
                read(text, size, tools=tools, opened=opened, tells_parts=tells_parts)
                for size in (1, 2, 5, 1000)
            ]
            assert found == found[:1] * len(found), text


def test_tools_that_are_too_long_together_have_any_arguments() -> None:
    parameters = {"type": "object", "properties": {"p": {"pattern": "d" * 9000}}}
    functions = [{"name": f"f{index}", "parameters": parameters} for index in range(100)]
    use = parse_tools([{"type": "function", "function": each} for each in functions], "required", None)
    grammar = forced_channels(ChannelPrompt(CHANNELS, PromptEnd.ROLE), use, None, field="")
    assert grammar is not None and "call_99" in grammar.source and "ddd" not in grammar.source
