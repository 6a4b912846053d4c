"""Messages over HTTP: whole, in streams, with tools, thinking and forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest
from tests.unit.serving.http.chat.models import (
    HERMES,
    MAY_REASON,
    PLAIN,
    chat_tokenizer,
    saying,
    service_info,
)
from tests.unit.serving.http.service import MODEL, Service, serving, typed_events_of

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
FULL = f"<think>Hm.</think>So:\n{CALL}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
CLOCK: dict[str, Any] = {"type": "custom", "name": "clock", "input_schema": {"type": "object"}}


async def ask(service: Service, **fields: Any) -> Any:
    status, answer = await service.post(PATH, {"messages": USER, "max_tokens": 300, **fields})
    assert status == 200, answer
    return answer


async def streamed(service: Service, **fields: Any) -> list[Any]:
    return await typed_events_of(service, PATH, {"messages": USER, "max_tokens": 300, **fields})


async def test_whole_message_has_all_its_fields() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    router = saying(tokenizer, "One, two.")
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    async with serving(router) as service:
        answer = await ask(
            service, model=MODEL, system=system, temperature=0.5, top_k=7, metadata={"user_id": "u"}
        )
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "One, two."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(router.requests[0].prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(tokenizer.encode("One, two.", add_special_tokens=False)) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert router.prompt() == "<|system|>Be brief.<|end|><|user|>Weather?<|end|><|assistant|>"
    request = router.requests[0]
    assert (request.max_tokens, request.sampling.temperature, request.sampling.top_k) == (300, 0.5, 7)


async def test_exact_events_of_thinking_text_and_a_call() -> None:
    tokenizer = chat_tokenizer(MAY_REASON)
    async with serving(saying(tokenizer, FULL, chunk_size=1000)) as service:
        events = await streamed(service, tools=[WEATHER])
    start, *rest = events
    usage = start["message"].pop("usage")
    assert start["message"].pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        },
    }
    assert (usage["input_tokens"] > 0, usage["output_tokens"]) == (True, 0)
    tool_id = rest[7]["content_block"].pop("id")
    assert len(tool_id) == 9
    last = rest[-2].pop("usage")
    assert last["input_tokens"] == usage["input_tokens"]
    assert last["output_tokens"] == len(tokenizer.encode(FULL, add_special_tokens=False)) + 1
    assert last["output_tokens_details"]["thinking_tokens"] > 0
    assert rest == [
        {"type": "ping"},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "Hm."},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "So:"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "name": "get_weather", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": '{"city": "Rome"}'},
        },
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}},
        {"type": "message_stop"},
    ]


def put_together(events: list[Any]) -> list[Any]:
    """The blocks of a stream, as clients put them together."""
    blocks = list[Any]()
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (_, part) = (
                value for name, value in sorted(event["delta"].items(), key=lambda item: item[0] != "type")
            )
            blocks[-1]["partial"] += part
    return blocks


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
async def test_stream_and_whole_message_have_the_same_blocks(chunk_size: int) -> None:
    text = FULL + "\n" + '<tool_call>{"name": "clock"}</tool_call>'
    async with serving(saying(MAY_REASON, text, chunk_size=chunk_size)) as service:
        answer = await ask(service, tools=[WEATHER, CLOCK])
        events = await streamed(service, tools=[WEATHER, CLOCK])
    blocks = put_together(events)
    assert [(block["type"], block["partial"]) for block in blocks] == [
        ("thinking", "Hm."),
        ("text", "So:"),
        ("tool_use", '{"city": "Rome"}'),
        ("tool_use", "{}"),
    ]
    thinking, content, first, second = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert content == {"type": "text", "text": "So:"}
    assert [(call["name"], call["input"]) for call in (first, second)] == [
        ("get_weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert first["id"] != second["id"]
    assert (answer["stop_reason"], events[-2]["delta"]["stop_reason"]) == ("tool_use", "tool_use")
    assert answer["usage"] == events[-2]["usage"]


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 30])
async def test_text_behind_a_call_never_comes_into_its_block(chunk_size: int) -> None:
    text = f"So:\n{CALL}\nDone, and well."
    async with serving(saying(HERMES, text, chunk_size=chunk_size)) as service:
        blocks = put_together(await streamed(service, tools=[WEATHER]))
    assert [block["partial"] for block in blocks if block["type"] == "tool_use"] == ['{"city": "Rome"}']
    texts = [block["partial"] for block in blocks if block["type"] == "text"]
    assert "".join(texts) == "So:\nDone, and well."


async def test_result_of_a_tool_comes_back_into_the_prompt_with_what_led_to_it() -> None:
    router = saying(MAY_REASON, FULL)
    async with serving(router) as service:
        content = (await ask(service, tools=[WEATHER]))["content"]
        result = {
            "type": "tool_result",
            "tool_use_id": content[2]["id"],
            "content": [{"type": "text", "text": "sunny"}],
            "is_error": False,
        }
        texts = [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]
        turns = [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result, {**result, "content": None}, *texts]},
        ]
        await ask(service, messages=[*USER, *turns], tools=[WEATHER])
    assert router.prompt().endswith(
        "<|user|>Weather?<|end|><|assistant|><think>\nHm.\n</think>\n\nSo:"
        '(get_weather: [["city", "Rome"]])<|end|><|tool|>sunny<|end|><|tool|><|end|>'
        "<|user|>And now?<|end|><|assistant|>"
    )


async def test_answer_goes_on_with_the_assistants_last_text_but_not_with_its_call() -> None:
    router = saying(HERMES, " two.")
    call = {"type": "tool_use", "id": "t1", "name": "clock", "input": {}}
    async with serving(router) as service:
        answer = await ask(service, messages=[*USER, {"role": "assistant", "content": "One,"}])
        said = {"type": "text", "text": "So:"}
        await ask(service, messages=[*USER, {"role": "assistant", "content": [said, call]}])
    assert router.prompt(0).endswith("<|assistant|>One,")
    assert router.prompt(1).endswith("So:(clock: [])<|end|><|assistant|>")
    assert answer["content"] == [{"type": "text", "text": " two."}]


ENDS = [
    ({"max_tokens": 3}, "max_tokens", None, "One,"),
    ({"stop_sequences": [" two", "x"]}, "stop_sequence", " two", "One,"),
    ({}, "end_turn", None, "One, two."),
]


@pytest.mark.parametrize(("fields", "reason", "sequence", "text"), ENDS, ids=[end[1] for end in ENDS])
async def test_ends_have_their_reasons(
    fields: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    async with serving(saying(PLAIN, "One, two.", chunk_size=4)) as service:
        answer = await ask(service, **fields)
        events = await streamed(service, **fields)
    ending = {"stop_reason": reason, "stop_sequence": sequence}
    assert events[-2]["delta"] == ending
    assert {name: answer[name] for name in ending} == ending
    if reason != "max_tokens":
        assert answer["content"][0]["text"] == text
    assert put_together(events)[0]["partial"] == answer["content"][0]["text"]


async def test_answer_of_nothing_has_no_blocks() -> None:
    async with serving(saying(PLAIN, "")) as service:
        assert (await ask(service))["content"] == []
        events = await streamed(service)
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("choice", "forced", "is_parallel"),
    [
        ({"type": "any"}, {"get_weather", "clock"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "clock"}, False),
        ({"type": "tool", "name": "clock"}, {"clock"}, True),
    ],
)
async def test_choice_of_tools_is_that_of_a_chat(choice: Any, forced: set[str], is_parallel: bool) -> None:
    router = saying(HERMES, CALL.replace("get_weather", "clock").replace('"city": "Rome"', ""))
    async with serving(router) as service:
        answer = await ask(service, tools=[WEATHER, CLOCK], tool_choice=choice)
        functions = [
            {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
            for tool in (WEATHER, CLOCK)
        ]
        named = {"type": "function", "function": {"name": "clock"}}
        body = {
            "messages": USER,
            "tools": functions,
            "tool_choice": "required" if choice["type"] == "any" else named,
            "parallel_tool_calls": is_parallel,
        }
        assert (await service.post("/v1/chat/completions", body))[0] == 200
    grammar = router.requests[0].sampling.grammar
    assert grammar is not None and grammar == router.requests[1].sampling.grammar
    assert {name for name in ("get_weather", "clock") if name in grammar.source} == forced
    assert answer["stop_reason"] == "tool_use"


async def test_choice_none_and_auto_leave_the_text_free() -> None:
    router = saying(HERMES, CALL)
    async with serving(router) as service:
        none = await ask(service, tools=[WEATHER], tool_choice={"type": "none"})
        auto = await ask(service, tools=[WEATHER], tool_choice={"type": "auto"})
    assert none["content"] == [{"type": "text", "text": CALL}]
    assert (none["stop_reason"], auto["stop_reason"]) == ("end_turn", "tool_use")
    assert [request.sampling.grammar for request in router.requests] == [None, None]


async def test_strict_tool_and_form_of_the_answer_have_their_grammars() -> None:
    router = saying(HERMES, '{"city": "Rome"}')
    form = {"type": "json_schema", "schema": SCHEMA}
    async with serving(router) as service:
        await ask(service, output_config={"format": form, "effort": "low"})
        await ask(service, tools=[{**WEATHER, "strict": True}])
        body = {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        }
        assert (await service.post("/v1/chat/completions", body))[0] == 200
    of_form, of_tool, of_chat = (request.sampling.grammar for request in router.requests)
    assert of_form is not None and of_form == of_chat
    assert of_tool is not None and "get_weather" in of_tool.source


async def test_thinking_is_a_variable_of_the_template_and_may_be_left_out() -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}" + MAY_REASON
    router = saying(template, "<think>Hm.</think>One.", chunk_size=2)
    async with serving(router) as service:
        await ask(service, thinking={"type": "enabled", "budget_tokens": 1024})
        await ask(service, thinking={"type": "disabled"})
        await ask(service, thinking={"type": "adaptive"}, output_config={"effort": "max"})
        hidden = await ask(service, thinking={"type": "adaptive", "display": "omitted"})
        events = await streamed(service, thinking={"type": "adaptive", "display": "omitted"})
        plain = await ask(service)
    starts = [router.prompt(index).partition("<|")[0] for index in (0, 1, 2, 5)]
    assert starts == ["True", "False", "Truemax", ""]
    assert hidden["content"] == [{"type": "text", "text": "One."}]
    assert [block["partial"] for block in put_together(events)] == ["One."]
    assert hidden["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert [block["type"] for block in plain["content"]] == ["thinking", "text"]


async def test_cached_tokens_are_told_apart_when_the_message_ends() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    tokens = [*tokenizer.encode("One", add_special_tokens=False), 1]

    def cached(_: GenerateRequest) -> int:
        return 2

    router = FakeRouterClient(info=service_info(tokenizer), reply=lambda _: tokens, cached=cached)
    async with serving(router, tokenizer=tokenizer) as service:
        usage = (await ask(service))["usage"]
        events = await streamed(service)
    num_tokens = len(router.requests[0].prompt_token_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_tokens - 2, 2)
    assert events[0]["message"]["usage"]["input_tokens"] == num_tokens
    assert events[-2]["usage"] == usage


async def test_fields_of_this_service_go_on_to_the_chat() -> None:
    router = saying(PLAIN, "One.")
    fields = {"seed": 5, "priority": 2, "timeout_s": 9.0, "return_speculation_metrics": True}
    async with serving(router) as service:
        answer = await ask(service, **fields)
        events = await streamed(service, **fields)
    request = router.requests[0]
    assert (request.sampling.seed, request.priority) == (5, 2)
    assert request.timeout_s is not None and 8.0 < request.timeout_s < 9.0
    assert set(answer["metrics"]) == set(events[-2]["metrics"]) == {"speculative_decoding"}


async def test_counted_tokens_are_those_of_the_message() -> None:
    router = saying(HERMES, "One.")
    fields: dict[str, Any] = {"messages": USER, "system": "Be brief.", "tools": [WEATHER]}
    async with serving(router) as service:
        counted = await service.post(COUNT, {"model": MODEL, **fields})
        usage = (await ask(service, **fields))["usage"]
        wrong = await service.post(COUNT, {**fields, "max_tokens": 5})
        other = await service.post(COUNT, {**fields, "model": "other"})
        bare = {"format": {"type": "json_schema"}}
        formless = await service.post(COUNT, {**fields, "output_config": bare})
    assert counted == (200, {"input_tokens": usage["input_tokens"]})
    assert len(router.requests) == 1
    assert (wrong[0], other[0], formless[0]) == (400, 404, 400)
    assert "max_tokens" in wrong[1]["error"]["message"]
