"""Responses that are refused, each by its own field, and errors before and after the first token."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.errors import EngineLostError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.tokenization import Tokenizer
from tests.unit.serving.http.chat.models import HERMES, PLAIN, chat_tokenizer, saying, service_info
from tests.unit.serving.http.service import MODEL, Service, serving, typed_events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/responses"
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


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"include": ["x"]}, "include[0]"),
    ({"input": None}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "web_search", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"tools": [{"name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": 5}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [CLOCK, {"type": "custom", "name": "x"}], "tool_choice": {"type": "custom", "name": "x"}},
        "tool_choice.type",
    ),
    (
        {"tools": [CLOCK, {"type": "custom", "name": "x"}], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
    ),
    (
        {
            "tools": [CLOCK, {"type": "web_search"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "clock"}, {"type": "web_search"}],
            },
        },
        "tool_choice.tools[1].type",
    ),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**CLOCK, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"tools": "a"}, "tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": 5}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
        "tool_choice.tools[0].name",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format.schema"),
    ({"text": {"x": 1}}, "text.x"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "a"}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
]


def make_router() -> FakeRouterClient:
    return saying(HERMES, "a")


@pytest.mark.parametrize(("fields", "param"), REFUSALS, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_done_is_refused_by_its_own_field(
    service: Service, router: FakeRouterClient, fields: dict[str, Any], param: str
) -> None:
    status, answer = await service.post(PATH, {"input": "a", **fields})
    assert (status, answer["error"]["param"], router.requests) == (400, param, [])
    assert param in answer["error"]["message"]


async def test_store_false_or_null_and_harmless_fields_are_answered() -> None:
    fields = {"prompt_cache_key": "a", "service_tier": "auto", "truncation": "disabled", "include": []}
    async with serving(saying(PLAIN, "a")) as service:
        for store in (False, None):
            inert = {"store": store, "background": False, "previous_response_id": None}
            status, answer = await service.post(PATH, {"input": "a", **fields, **inert})
            assert (status, answer["store"]) == (200, False)


async def test_input_that_the_template_refuses_is_named_as_the_input() -> None:
    async with serving(saying("{{ raise_exception('not so') }}", "a")) as service:
        status, answer = await service.post(PATH, {"input": "a"})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert answer["error"]["message"] == "input: the model's chat template refuses them: not so"


async def test_unknown_fields_are_ignored_where_that_is_configured_but_not_what_is_known() -> None:
    lenient = parse_config({"served_model_name": MODEL, "http": {"unknown_fields": "ignore"}})
    body = {"input": "a", "new_field": 1, "text": {"new_field": 2}}
    async with serving(saying(PLAIN, "a"), config=lenient) as service:
        assert (await service.post(PATH, body))[0] == 200
        status, answer = await service.post(PATH, {**body, "store": True})
        assert (status, answer["error"]["param"]) == (400, "store")


async def test_errors_before_the_first_token_have_their_status_and_later_ones_are_an_event() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    lost, full = EngineLostError("the target was lost"), OverloadedError("full", 2.5)
    router = FakeRouterClient(info=service_info(tokenizer), errors=[lost, full, full])
    async with serving(router, tokenizer=tokenizer) as service:
        for body, status in (({}, 503), ({"stream": True}, 429), ({}, 429)):
            async with service.http.post(PATH, json={"input": "a", **body}) as response:
                assert response.status == status
                assert "Retry-After" in response.headers
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    breaking = Breaking(tokenizer)
    async with serving(breaking, tokenizer=tokenizer) as service:
        events = await typed_events_of(service, PATH, {"input": "a"})
    failed = events[-1]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", len(events) - 1)
    response = failed["response"]
    assert response["error"] == {"code": "server_error", "message": "the target was lost"}
    assert response["status"] == "failed"
    assert response["output"][0]["content"][0]["text"] == "One"
    assert response["output"][0]["status"] == "incomplete"


class Breaking(FakeRouterClient):
    """A router whose stream breaks after its first tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.encode("One", add_special_tokens=False)
        super().__init__(
            info=service_info(tokenizer), reply=lambda _: [*tokens, *tokens], chunk_size=len(tokens)
        )

    async def stream(self, request: Any) -> Any:
        async for chunk in super().stream(request):
            yield chunk
            raise EngineLostError("the target was lost")
