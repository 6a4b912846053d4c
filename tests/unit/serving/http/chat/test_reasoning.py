"""Reasoning of a model: apart from the content, counted, free before a grammar, taken back in messages."""

from __future__ import annotations

from typing import Any

import pytest

from specray.tokenization import Tokenizer
from tests.unit.serving.http.chat.models import (
    MAY_REASON,
    OPENS_REASONING,
    PLAIN,
    chat_tokenizer,
    grammar_compiler,
    saying,
)
from tests.unit.serving.http.service import events_of, serving

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
THOUGHT = "Hm.\n</think>\n\n"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


async def ask(tokenizer: Tokenizer, text: str, **fields: Any) -> tuple[Any, Any]:
    """Answer and the router's request."""
    router = saying(tokenizer, text, chunk_size=3)
    async with serving(router) as service:
        status, answer = await service.post(CHAT, {"messages": USER, **fields})
    assert status == 200, answer
    return answer, router.requests[0]


@pytest.mark.parametrize("has_markers", [True, False], ids=["marker-tokens", "marker-text"])
@pytest.mark.parametrize(("template", "opening"), [(OPENS_REASONING, ""), (MAY_REASON, "<think>\n")])
async def test_reasoning_stands_apart_and_is_counted(template: str, opening: str, has_markers: bool) -> None:
    tokenizer = chat_tokenizer(template, has_markers=has_markers)
    answer, _ = await ask(tokenizer, opening + THOUGHT + "Yes.")
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == num_reasoning_tokens(tokenizer, opening + THOUGHT + "Yes.", is_open=not opening)


def num_reasoning_tokens(tokenizer: Tokenizer, text: str, *, is_open: bool) -> int:
    """Tokens from that which completes the opening marker to that which completes the closing one."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    told = [tokenizer.decode(token_ids[: place + 1]) for place in range(len(token_ids))]
    before = ["", *told[:-1]]
    return sum(
        (is_open or "<think>" in now) and "</think>" not in then
        for then, now in zip(before, told, strict=True)
    )


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
async def test_reasoning_is_streamed_in_a_field_of_its_own(chunk_size: int) -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING)
    router = saying(tokenizer, "Hm, so.\n\n</think>\n\nYes, so.", chunk_size=chunk_size)
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    async with serving(router) as service:
        *events, last = await events_of(service, CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes, so."
    num_tokens = len(tokenizer.encode("Hm, so.\n\n</think>", add_special_tokens=False))
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


async def test_reasoning_that_does_not_end_has_no_content() -> None:
    answer, _ = await ask(chat_tokenizer(OPENS_REASONING), "Hm.")
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "")


async def test_template_variable_turns_reasoning_off() -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING)
    answer, request = await ask(tokenizer, "Yes.", chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(request.prompt_token_ids).endswith("<think>\n</think>\n\n")
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (None, "Yes.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_model_without_reasoning_says_nothing_of_it() -> None:
    answer, _ = await ask(chat_tokenizer(PLAIN), "a </think> b")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "a </think> b",
        "refusal": None,
    }
    assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_comes_back_in_messages(name: str) -> None:
    tokenizer = chat_tokenizer(MAY_REASON, has_markers=False)
    history = [*USER, {"role": "assistant", "content": "Yes.", name: "Hm."}, *USER]
    _, request = await ask(tokenizer, "a", messages=history)
    assert "<think>\nHm.\n</think>\n\nYes." in tokenizer.decode(request.prompt_token_ids)


@pytest.mark.parametrize("has_markers", [True, False], ids=["marker-tokens", "marker-text"])
@pytest.mark.parametrize(
    ("template", "opening", "needs_thought"), [(OPENS_REASONING, "", True), (MAY_REASON, "<think>\n", False)]
)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": SCHEMA}, "12"),
        ({"guided_regex": "[a-c]/\\/1"}, "b//1"),
        ({"guided_choice": ["x"]}, "x"),
    ],
)
async def test_grammar_begins_behind_the_reasoning(
    fields: Any, text: str, template: str, opening: str, needs_thought: bool, has_markers: bool
) -> None:
    tokenizer = chat_tokenizer(template, has_markers=has_markers)
    answer, request = await ask(tokenizer, opening + THOUGHT + text, **fields)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", text)
    matcher = grammar_compiler(tokenizer).matcher(request.sampling.grammar)

    def num_legal(answer: str) -> tuple[int, int]:
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        return matcher.count_legal((), tokens), len(tokens)

    legal, total = num_legal(opening + THOUGHT + text)
    assert legal == total
    legal, total = num_legal(opening + THOUGHT + "z")
    assert legal < total
    legal, total = num_legal(text)
    assert (legal == total) or needs_thought


async def test_grammar_of_several_rules_holds_from_the_first_token_on() -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING)
    answer, request = await ask(tokenizer, "b", guided_grammar='start: a\na: "b"')
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (None, "b")
    assert request.sampling.grammar.source == 'start: a\na: "b"'


async def test_grammar_that_spells_the_markers_of_reasoning_is_the_whole_answer() -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING, has_markers=True)
    end_id = tokenizer.added_token_id("</think>")
    for named in ("</think>", f"<[{end_id}]>"):
        source = f'start: "a" {named} "b"'
        answer, request = await ask(tokenizer, "a</think>b", guided_grammar=source)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("a", "b")
        assert request.sampling.grammar.source == source
    # As a string it is text, which comes after the reasoning.
    answer, request = await ask(tokenizer, "a</think>b", guided_choice=["</think>", "b"])
    assert (
        request.sampling.grammar.source != 'start: "</think>" | "b"'
        and "think:" in request.sampling.grammar.source
    )


@pytest.mark.parametrize("field", ["reasoning_effort", "verbosity"])
async def test_wishes_reach_a_template_that_knows_them(field: str) -> None:
    tokenizer = chat_tokenizer("{% if " + field + " %}[{{ " + field + " }}]{% endif %}" + PLAIN)
    _, request = await ask(tokenizer, "a", **{field: "low"})
    assert tokenizer.decode(request.prompt_token_ids).startswith("[low]")
    _, request = await ask(chat_tokenizer(PLAIN), "a", **{field: "low"})
    assert "low" not in tokenizer.decode(request.prompt_token_ids)
