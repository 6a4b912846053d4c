"""Responses over HTTP: whole, in streams, with tools, reasoning, forms and logprobs, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.unit.serving.http.chat.models import HERMES, MAY_REASON, PLAIN, chat_tokenizer, saying
from tests.unit.serving.http.service import MODEL, Service, serving, typed_events_of

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
FULL = f"<think>Hm.</think>So:\n{CALL}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock"}


async def ask(service: Service, **fields: Any) -> Any:
    status, answer = await service.post(PATH, {"input": "Weather?", **fields})
    assert status == 200, answer
    return answer


async def test_whole_response_has_all_its_fields() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    router = saying(tokenizer, "One, two.")
    asked = {"model": MODEL, "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50}
    async with serving(router) as service:
        answer = await ask(service, **asked, temperature=0.5, user="u", stream_options={})
    key = answer["id"].removeprefix("resp_")
    assert len(key) == 32 and answer.pop("created_at") > 1.7e9
    num_tokens = len(tokenizer.encode("One, two.", add_special_tokens=False)) + 1
    num_prompt_tokens = len(router.requests[0].prompt_token_ids)
    part = {"type": "output_text", "text": "One, two.", "annotations": [], "logprobs": []}
    message = {"id": f"msg_{key}_0", "type": "message", "status": "completed", "role": "assistant"}
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "id": f"resp_{key}",
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": MODEL,
        "output": [{**message, "content": [part]}],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt_tokens + num_tokens,
        },
    }
    assert router.prompt() == "<|system|>Be brief.<|end|><|user|>Weather?<|end|><|assistant|>"
    assert (router.requests[0].max_tokens, router.requests[0].sampling.temperature) == (50, 0.5)


@pytest.mark.parametrize("chunk_size", [2, 1000])
async def test_stream_has_its_events_in_order_and_numbered(chunk_size: int) -> None:
    router = saying(MAY_REASON, FULL, chunk_size=chunk_size)
    async with serving(router) as service:
        events = await typed_events_of(service, PATH, {"input": "a", "tools": [WEATHER]})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *steps, completed = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert created["response"]["usage"] is None
    texts: dict[str, str] = {}
    kinds = list[tuple[int, str]]()
    for event in steps:
        kind = (event["output_index"], event["type"].removeprefix("response."))
        if kind[1].endswith(".delta"):
            texts[kind[1]] = texts.get(kind[1], "") + event["delta"]
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    assert texts == {
        "reasoning_text.delta": "Hm.",
        "output_text.delta": "So:",
        "function_call_arguments.delta": '{"city": "Rome"}',
    }
    text_events = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    assert kinds == [
        (0, "output_item.added"),
        *((0, kind.format("reasoning_text")) for kind in text_events),
        (0, "output_item.done"),
        (1, "output_item.added"),
        *((1, kind.format("output_text")) for kind in text_events),
        (1, "output_item.done"),
        (2, "output_item.added"),
        (2, "function_call_arguments.delta"),
        (2, "function_call_arguments.done"),
        (2, "output_item.done"),
    ]
    items = [event["item"] for event in steps if event["type"] == "response.output_item.done"]
    response = completed["response"]
    assert (completed["type"], response["status"]) == ("response.completed", "completed")
    assert response["output"] == items
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    added = [event["item"] for event in steps if event["type"] == "response.output_item.added"]
    assert [(item["id"], item["status"]) for item in added] == [(item["id"], "in_progress") for item in items]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]


async def test_exact_events_of_a_short_text() -> None:
    async with serving(saying(PLAIN, "One.", chunk_size=1000)) as service:
        events = await typed_events_of(service, PATH, {"input": "a"})
    item_id = f"msg_{events[0]['response']['id'].removeprefix('resp_')}_0"
    place = {"output_index": 0, "item_id": item_id, "content_index": 0}
    part = {"type": "output_text", "annotations": [], "logprobs": []}
    item = {"id": item_id, "type": "message", "role": "assistant"}
    done = {**part, "text": "One."}
    assert events[2:-1] == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
            "sequence_number": 2,
        },
        {
            "type": "response.content_part.added",
            **place,
            "part": {**part, "text": ""},
            "sequence_number": 3,
        },
        {
            "type": "response.output_text.delta",
            **place,
            "delta": "One.",
            "logprobs": [],
            "sequence_number": 4,
        },
        {
            "type": "response.output_text.done",
            **place,
            "text": "One.",
            "logprobs": [],
            "sequence_number": 5,
        },
        {"type": "response.content_part.done", **place, "part": done, "sequence_number": 6},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {**item, "status": "completed", "content": [done]},
            "sequence_number": 7,
        },
    ]


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
async def test_stream_and_whole_response_have_the_same_output(chunk_size: int) -> None:
    router = saying(MAY_REASON, FULL, chunk_size=chunk_size)
    async with serving(router) as service:
        whole = await ask(service, tools=[WEATHER])
        events = await typed_events_of(service, PATH, {"input": "Weather?", "tools": [WEATHER]})
    streamed = events[-1]["response"]
    for response in (whole, streamed):
        for item in response["output"]:
            item["id"] = item["id"].split("_")[0]
            item.pop("call_id", None)
    assert whole["output"] == streamed["output"]
    assert whole["usage"] == streamed["usage"]
    assert [item["id"] for item in whole["output"]] == ["rs", "msg", "fc"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (whole["output"][2]["name"], whole["output"][2]["arguments"]) == (
        "get_weather",
        '{"city": "Rome"}',
    )


@pytest.mark.parametrize("chunk_size", [1, 5])
async def test_call_that_is_cut_in_a_stream_is_incomplete_with_the_arguments_so_far(chunk_size: int) -> None:
    tokenizer = chat_tokenizer(HERMES)
    num_tokens = len(tokenizer.encode(CALL.split(': "Rome')[0] + ":", add_special_tokens=False))
    asked = {"input": "Weather?", "tools": [WEATHER], "max_output_tokens": num_tokens}
    async with serving(saying(tokenizer, CALL, chunk_size=chunk_size)) as service:
        *events, end = await typed_events_of(service, PATH, asked)
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    (done,) = [event for event in events if event["type"].endswith("arguments.done")]
    (item,) = end["response"]["output"]
    assert end["type"] == "response.incomplete"
    assert "".join(deltas) == done["arguments"] == item["arguments"] == '{"city":'
    assert (done["name"], item["status"]) == ("get_weather", "incomplete")


async def test_output_of_a_tool_comes_back_into_the_prompt_with_what_led_to_it() -> None:
    router = saying(MAY_REASON, FULL)
    async with serving(router) as service:
        output = (await ask(service, tools=[WEATHER]))["output"]
        result = {
            "type": "function_call_output",
            "call_id": output[2]["call_id"],
            "output": [{"type": "input_text", "text": "sunny"}],
        }
        question = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
        await ask(service, input=[question, *output, result], tools=[WEATHER])
    assert router.prompt().endswith(
        "<|user|>Weather?<|end|><|assistant|><think>\nHm.\n</think>\n\nSo:"
        '(get_weather: [["city", "Rome"]])<|end|><|tool|>sunny<|end|><|assistant|>'
    )


async def test_items_of_one_turn_are_one_message_and_the_next_turn_is_another() -> None:
    router = saying(HERMES, "a")
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "message", "role": "assistant", "content": "B"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"role": "assistant", "content": "C"},
    ]
    async with serving(router) as service:
        await ask(service, input=items)
    assert router.prompt() == (
        "<|system|>Rules.<|end|><|assistant|>A(clock: [])(clock: [])<|end|><|assistant|>B<|end|>"
        "<|assistant|>C<|end|><|assistant|>"
    )


async def test_answer_cut_by_its_bound_is_incomplete() -> None:
    async with serving(saying(PLAIN, "One, two, three.")) as service:
        answer = await ask(service, max_output_tokens=3)
        events = await typed_events_of(service, PATH, {"input": "Weather?", "max_output_tokens": 3})
    for response in (answer, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", {"get_weather", "clock"}),
        ({"type": "function", "name": "get_weather"}, {"get_weather"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [CLOCK]}, {"clock"}),
    ],
)
async def test_forced_calls_have_a_grammar_of_the_chosen_tools(choice: Any, forced: set[str]) -> None:
    router = saying(HERMES, CALL)
    async with serving(router) as service:
        answer = await ask(service, tools=[WEATHER, CLOCK], tool_choice=choice)
    grammar = router.requests[0].sampling.grammar
    assert grammar is not None
    assert {name for name in ("get_weather", "clock") if name in grammar.source} == forced
    assert (answer["tool_choice"], answer["status"]) == (choice, "completed")


async def test_form_of_the_text_is_the_grammar_of_a_chat_with_that_form() -> None:
    router = saying(PLAIN, '{"city": "Rome"}')
    schema = WEATHER["parameters"]
    form = {"type": "json_schema", "name": "city", "schema": schema, "strict": True}
    async with serving(router) as service:
        answer = await ask(service, text={"format": form, "verbosity": "low"})
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": schema, "strict": True},
            },
        }
        assert (await service.post("/v1/chat/completions", body))[0] == 200
        await ask(service, text={"format": {"type": "json_object"}})
        await ask(service, text={"format": {"type": "text"}})
    grammars = [request.sampling.grammar for request in router.requests]
    assert grammars[0] is not None and grammars[0] == grammars[1]
    assert grammars[2] is not None and grammars[3] is None
    assert answer["text"] == {"format": form, "verbosity": "low"}


async def test_logprobs_come_with_the_tokens_of_the_text_alone() -> None:
    asked = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 1}
    async with serving(saying(MAY_REASON, "<think>Hm.</think>One.", chunk_size=1000)) as service:
        answer = await ask(service, **asked)
        events = await typed_events_of(service, PATH, {"input": "Weather?", **asked})
        bare = await ask(service)
    logprobs = answer["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == "One.</s>"
    assert all(len(entry["top_logprobs"]) == 1 for entry in logprobs)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    for event in deltas:
        assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == logprobs
    assert bare["output"][1]["content"][0]["logprobs"] == []


async def test_logprobs_of_a_call_are_not_those_of_the_text_before_it() -> None:
    async with serving(saying(HERMES, f"So:{CALL}")) as service:
        answer = await ask(service, tools=[WEATHER], top_logprobs=1)
    message, call = answer["output"]
    tokens = [entry["token"] for entry in message["content"][0]["logprobs"]]
    assert ("".join(tokens), call["type"]) == ("So:", "function_call")


async def test_effort_none_closes_the_reasoning_unless_the_request_says_otherwise() -> None:
    router = saying("{{ enable_thinking }}{{ reasoning_effort }}" + PLAIN, "a")
    async with serving(router) as service:
        await ask(service, reasoning={"effort": "none", "summary": "auto"})
        await ask(service, reasoning={"effort": "none"}, chat_template_kwargs={"enable_thinking": True})
        await ask(service, reasoning={"effort": "low"})
    starts = [router.prompt(index).partition("<|")[0] for index in range(3)]
    assert starts == ["Falsenone", "Truenone", "low"]


async def test_fields_of_this_service_go_on_to_the_chat() -> None:
    router = saying(PLAIN, "a b c")
    fields = {"seed": 5, "top_k": 3, "stop": [" b"], "priority": 2, "timeout_s": 9.0}
    async with serving(router) as service:
        answer = await ask(service, **fields, speculation={"enabled": False}, return_speculation_metrics=True)
        body = {"input": "Weather?", "return_speculation_metrics": True}
        events = await typed_events_of(service, PATH, body)
        async with service.http.post(
            PATH, json={"input": "a"}, headers={"X-Request-Timeout-Seconds": "7"}
        ) as response:
            assert response.status == 200
    request = router.requests[0]
    assert (request.sampling.seed, request.sampling.top_k, request.stop) == (5, 3, (" b",))
    assert (request.priority, request.speculation.enabled) == (2, False)
    # Of what the header or the body allows a part is over.
    times = [request.timeout_s or 0.0 for request in (router.requests[0], router.requests[2])]
    assert 8.0 < times[0] < 9.0 and 6.0 < times[1] < 7.0
    assert answer["output"][0]["content"][0]["text"] == "a"
    assert set(answer["metrics"]) == set(events[-1]["response"]["metrics"]) == {"speculative_decoding"}


class City(BaseModel):
    city: str


@pytest.mark.slow
async def test_openai_client_parses_whole_responses_and_streams() -> None:
    async with serving(saying(PLAIN, '{"city": "Rome"}', chunk_size=2)) as service:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
        async with client:
            parsed = await client.responses.parse(model=MODEL, input="City?", text_format=City)
            async with client.responses.stream(model=MODEL, input="City?", text_format=City) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            with pytest.raises(openai.BadRequestError, match="store is"):
                await client.responses.create(model=MODEL, input="City?", store=True)
    assert parsed.output_parsed == final.output_parsed == City(city="Rome")
    assert json.loads(parsed.output_text) == {"city": "Rome"}
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
