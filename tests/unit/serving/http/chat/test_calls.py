"""Calls of tools over HTTP: read from what the model writes, forced in its own format, and streamed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from tests.unit.serving.http.chat.models import (
    HERMES,
    OPENS_REASONING,
    PLAIN,
    TEMPLATES,
    babbling,
    chat_tokenizer,
    grammar_compiler,
    saying,
)
from tests.unit.serving.http.service import MODEL, Service, events_of, serving

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Rome?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
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
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
SCHEMAS = {"get_weather": WEATHER["function"]["parameters"], "clock": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ROME = {"city": "Rome"}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    "mistral_args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}',
}
"""The same call in each format."""


async def ask(service: Service, **fields: Any) -> Any:
    status, answer = await service.post(CHAT, {"messages": USER, "tools": TOOLS, **fields})
    assert status == 200, answer
    return answer["choices"][0]


async def refusal(router: FakeRouterClient, **fields: Any) -> tuple[str, str]:
    async with serving(router) as service:
        status, answer = await service.post(CHAT, {"messages": USER, "tools": TOOLS, **fields})
    assert status == 400 and router.requests == []
    return answer["error"]["param"], answer["error"]["message"]


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def has_ended(choice: Any) -> bool:
    return bool(choice["finish_reason"] != "length")


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in message["tool_calls"])
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("has_markers", [True, False], ids=["marker-tokens", "marker-text"])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_call_is_read_in_the_format_of_the_model(name: str, has_markers: bool) -> None:
    async with serving(
        saying(chat_tokenizer(TEMPLATES[name], has_markers=has_markers), WRITTEN[name])
    ) as service:
        choice = await ask(service)
    assert calls_of(choice["message"]) == [("get_weather", ROME)]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("has_markers", [True, False], ids=["marker-tokens", "marker-text"])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_required_call_is_forced_and_valid_and_reads_back(name: str, has_markers: bool) -> None:
    fields = [{}, {}, {"parallel_tool_calls": False}, {"parallel_tool_calls": False}]
    async with serving(babbling(chat_tokenizer(TEMPLATES[name], has_markers=has_markers), seed=0)) as service:
        choices = [await ask(service, tool_choice="required", **each) for each in fields]
    ended = [(choice, each) for choice, each in zip(choices, fields, strict=True) if has_ended(choice)]
    assert len(ended) >= 2
    for choice, each in ended:
        calls = calls_of(choice["message"])
        for function, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[function])
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        assert len(calls) == 1 or not each


async def test_named_call_is_forced_and_ends_with_stop() -> None:
    async with serving(babbling(HERMES, seed=1)) as service:
        choice = await ask(service, tool_choice=NAMED)
    # Called once, though several calls are allowed otherwise.
    assert [name for name, _ in calls_of(choice["message"])] == ["get_weather"]
    assert choice["finish_reason"] == "stop"


async def test_allowed_tools_bound_the_calls_but_all_tools_are_shown() -> None:
    tokenizer = chat_tokenizer(HERMES)
    router = babbling(tokenizer, seed=1)
    clock = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [clock]}}
    async with serving(router) as service:
        answer = await ask(service, tool_choice=choice)
    assert {name for name, _ in calls_of(answer["message"])} == {"clock"}
    assert answer["finish_reason"] == "tool_calls"
    assert "get_weather" in tokenizer.decode(router.requests[0].prompt_token_ids)


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
async def test_stream_has_deltas_as_the_openai_client_puts_them_together(chunk_size: int) -> None:
    text = "Let me see.\n" + WRITTEN["hermes"] + '\n<tool_call>{"name": "clock"}</tool_call>\n'
    async with serving(saying(HERMES, text, chunk_size=chunk_size)) as service:
        events = await events_of(service, CHAT, {"messages": USER, "tools": TOOLS, "stream": True})
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    deltas = [choice["delta"] for choice in choices[1:-1]]
    texts = [delta["content"] for delta in deltas if "content" in delta]
    assert "".join(texts) == "Let me see."
    calls = [entry for delta in deltas if "tool_calls" in delta for entry in delta["tool_calls"]]
    ids = [call.pop("id") for call in calls if "id" in call]
    assert len(set(ids)) == 2
    places = [place for place, call in enumerate(calls) if "type" in call]
    assert [calls[place] for place in places] == [
        {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}},
        {"index": 1, "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]
    for index, (first, end, arguments) in enumerate(
        [(places[0] + 1, places[1], '{"city": "Rome"}'), (places[1] + 1, len(calls), "{}")]
    ):
        pieces = [call["function"].pop("arguments") for call in calls[first:end]]
        assert "".join(pieces) == arguments
        assert len(pieces) == (1 if index else {1: 10, 4: 3, 1000: 1}[chunk_size])
        assert calls[first:end] == [{"index": index, "function": {}}] * len(pieces)
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


class GetWeather(BaseModel):
    city: str
    days: int


@pytest.mark.slow
async def test_openai_helpers_parse_strict_tools_and_stream_them() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    router = saying(HERMES, "So:" + call)
    async with serving(router) as service:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
        async with client:
            asked: Any = {"model": MODEL, "messages": USER, "tools": [tool]}
            parsed = await client.chat.completions.parse(**asked)
            async with client.chat.completions.stream(**asked) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
    assert all(request.sampling.grammar is not None for request in router.requests)
    for completion in (parsed, final):
        message = completion.choices[0].message
        assert message.content == "So:" and message.tool_calls is not None
        assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Rome", days=2)
        assert completion.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in kinds


async def test_answer_of_a_tool_comes_back_into_the_prompt() -> None:
    tokenizer = chat_tokenizer(HERMES)
    router = saying(tokenizer, WRITTEN["hermes"])
    async with serving(router) as service:
        message = (await ask(service))["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        await ask(service, messages=[*USER, message, result])
    text = tokenizer.decode(router.requests[1].prompt_token_ids)
    assert 'Weather in Rome?(get_weather: [["city", "Rome"]])sunny' in text


async def test_template_that_ignores_tools_refuses_them_but_not_their_history_or_choice_none() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    assert (await refusal(saying(tokenizer, "a")))[0] == "tools"
    router = saying(tokenizer, WRITTEN["hermes"])
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    async with serving(router) as service:
        choice = await ask(service, tool_choice="none", messages=[*USER, *history])
    assert (choice["message"]["content"], choice["finish_reason"]) == (WRITTEN["hermes"], "stop")
    assert "tool_calls" not in choice["message"]


async def test_choice_none_neither_shows_tools_nor_reads_calls() -> None:
    tokenizer = chat_tokenizer(HERMES)
    router = saying(tokenizer, WRITTEN["hermes"])
    async with serving(router) as service:
        choice = await ask(service, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (WRITTEN["hermes"], "stop")
    assert "get_weather" not in tokenizer.decode(router.requests[0].prompt_token_ids)


async def test_truncated_call_is_content_and_ends_with_length() -> None:
    tokenizer = chat_tokenizer(HERMES)
    num_tokens = len(tokenizer.encode(WRITTEN["hermes"], add_special_tokens=False))
    async with serving(saying(tokenizer, WRITTEN["hermes"])) as service:
        cut = await ask(service, max_tokens=num_tokens - 5)
        whole = await ask(service, max_tokens=num_tokens)
    assert cut["finish_reason"] == whole["finish_reason"] == "length"
    assert "tool_calls" not in cut["message"] and WRITTEN["hermes"].startswith(cut["message"]["content"])
    assert len(whole["message"]["tool_calls"]) == 1


async def test_one_call_at_most_without_parallel_calls_also_where_it_is_not_forced() -> None:
    async with serving(saying(HERMES, WRITTEN["hermes"] * 3)) as service:
        assert len((await ask(service))["message"]["tool_calls"]) == 3
        assert len((await ask(service, parallel_tool_calls=False))["message"]["tool_calls"]) == 1


async def test_every_choice_is_read_by_itself() -> None:
    body = {"messages": USER, "tools": TOOLS, "n": 2, "stream": True}
    async with serving(saying(HERMES, WRITTEN["hermes"], chunk_size=3)) as service:
        events = await events_of(service, CHAT, body)
    arguments = {0: "", 1: ""}
    for event in events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                assert call["index"] == 0
                arguments[choice["index"]] += call["function"]["arguments"]
    assert arguments == {0: '{"city": "Rome"}', 1: '{"city": "Rome"}'}


async def test_form_of_the_text_holds_beside_calls() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}},
    }
    kinds = set()
    async with serving(babbling(HERMES, seed=0)) as service:
        choices = [await ask(service, response_format=form) for _ in range(8)]
    for choice in choices:
        message = choice["message"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(message["content"]), schema)
        kinds.add((choice["finish_reason"], message["content"] is None))
    assert kinds - {("length", False)} == {("stop", False), ("tool_calls", True)}


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (HERMES, {"tools": [{"type": 3}]}, "tools[0].type"),
        (HERMES, {"tool_choice": "any"}, "tool_choice"),
        (HERMES, {"tools": None, "tool_choice": "required"}, "tool_choice"),
        (HERMES, {"tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        (HERMES, {"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (HERMES.replace("tool_call>", ">"), {"tool_choice": "required"}, "tool_choice"),
        (HERMES.replace("tool_call>", ">"), {"response_format": {"type": "json_object"}}, "tools"),
        (HERMES, {"guided_grammar": 'start: a\na: "b"'}, "tools"),
        (PLAIN, {"tool_choice": "required"}, "tools"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_field(
    template: str, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(saying(template, "a"), **fields))[0] == param


async def test_schema_that_cannot_be_enforced_names_its_keyword() -> None:
    tool = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}
    param, message = await refusal(saying(HERMES, "a"), tools=[tool])
    assert param == "tools" and '"not"' in message


@pytest.mark.parametrize("chunk_size", [1, 1000])
@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_call_that_has_to_be_valid_comes_after_free_reasoning(choice: str, chunk_size: int) -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING)
    answer = "Hm, Rome.\n</think>\n\n" + WRITTEN["hermes"]
    router = saying(tokenizer, answer, chunk_size=chunk_size)
    async with serving(router) as service:
        message = (await ask(service, tools=[strict(WEATHER)], tool_choice=choice))["message"]
    assert message["reasoning_content"] == "Hm, Rome."
    assert calls_of(message) == [("get_weather", ROME)]
    grammar = router.requests[0].sampling.grammar
    assert grammar is not None
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    assert grammar_compiler(tokenizer).matcher(grammar).count_legal((), tokens) == len(tokens)


def test_config_has_a_section_for_chats() -> None:
    assert parse_config({"chat": {"allow_special_tokens": True}}).chat.allow_special_tokens
