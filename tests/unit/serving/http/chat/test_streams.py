"""Streams of chats: text never rides on the event of the end, whatever ends the answer."""

from __future__ import annotations

from typing import Any

import pytest

from specray.tokenization import Tokenizer
from tests.unit.serving.http.chat.models import HERMES, MAY_REASON, PLAIN, chat_tokenizer, saying
from tests.unit.serving.http.service import events_of, serving

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "clock"}}


async def streamed(tokenizer: Tokenizer, text: str, *, chunk_size: int, **fields: Any) -> list[Any]:
    """The choices of a stream's events, in order."""
    router = saying(tokenizer, text, chunk_size=chunk_size)
    async with serving(router) as service:
        events = await events_of(service, CHAT, {"messages": USER, "stream": True, **fields})
    return [choice for event in events for choice in event["choices"]]


ENDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "eos": ("One, two.", {}, "One, two.", "stop"),
    "length": ("One, two, three, four, five.", {"max_tokens": 4}, "One, two,", "length"),
    "stop-string": ("One, two.", {"stop": [" two"]}, "One,", "stop"),
    "held-back-text": ("One, two, tw", {"stop": [" two!"]}, "One, two, tw", "stop"),
    "half-a-character": ("Oné", {"max_tokens": 3}, "On\ufffd", "length"),
    "unfinished-marker": ("One <tool", {"tools": [TOOL]}, "One <tool", "stop"),
    "malformed-call": (
        "One <tool_call>x</tool_call>",
        {"tools": [TOOL]},
        "One <tool_call>x</tool_call>",
        "stop",
    ),
    "reasoning-alone": ("<think>One", {}, "", "stop"),
}


TEMPLATES = {"reasoning": MAY_REASON, "tools": HERMES, "plain": PLAIN}
CASES = [
    (end, template)
    for end, (_, fields, _, _) in ENDS.items()
    for template in TEMPLATES
    if not ("tools" in fields and template == "plain")
    and not (end == "reasoning-alone" and template != "reasoning")
]


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize(("end", "template"), CASES)
async def test_text_comes_before_the_event_of_the_end(end: str, template: str, chunk_size: int) -> None:
    text, fields, content, reason = ENDS[end]
    tokenizer = chat_tokenizer(TEMPLATES[template], has_markers=False)
    if end == "half-a-character":
        num_tokens = len(tokenizer.encode("On", add_special_tokens=False)) + 1
        fields = {"max_tokens": num_tokens}
    choices = await streamed(tokenizer, text, chunk_size=chunk_size, **fields)
    *before, last = choices
    if end == "length":
        content = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:4])
    assert "".join(choice["delta"].get("content") or "" for choice in before) == content
    assert (last["delta"], last["logprobs"], last["finish_reason"]) == ({}, None, reason)
    assert {choice["finish_reason"] for choice in before} == {None}


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
async def test_logprobs_of_all_tokens_come_with_the_text(chunk_size: int) -> None:
    tokenizer = chat_tokenizer(PLAIN)
    choices = await streamed(tokenizer, "One, two.", chunk_size=chunk_size, logprobs=True, top_logprobs=0)
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == "One, two.</s>"
    assert choices[-1]["logprobs"] is None


async def test_ends_of_several_choices_stand_apart() -> None:
    choices = await streamed(chat_tokenizer(PLAIN), "One.", chunk_size=1000, n=3)
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]
    assert all(choice["delta"] == {} for choice in ends)
