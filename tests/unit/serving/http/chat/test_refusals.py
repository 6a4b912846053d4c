"""Tests of chats that are refused: a 400 that names the field, and nothing reaches the router."""

from __future__ import annotations

from typing import Any

import pytest

from specray.fakes import FakeRouterClient
from tests.unit.serving.http.service import Service

pytestmark = pytest.mark.asyncio(loop_scope="module")


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages[0]", "allowed"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "'robot'; allowed: system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "None; allowed: a string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5; allowed: a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "with http.images: placeholder image_url",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        "messages[0].tool_calls",
        "only in messages of assistant",
    ),
    ({"messages": [{"role": "user", "content": "a", "audio": 0}]}, "messages[0].audio", "support"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "the user begins"),
    ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages", "allowed: 1..63"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21; allowed: 0..20"),
    ({"logprobs": 1}, "logprobs", "a valid boolean"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0; allowed: 1..2147483647"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "differ"),
    ({"prompt": "a"}, "prompt", "not a field"),
    ({"reasoning_effort": 3}, "reasoning_effort", "allowed: a valid string"),
    ({"modalities": ["audio"]}, "modalities", "not support"),
    ({"n": 0}, "n", "0; allowed: 1..128"),
]


@pytest.mark.parametrize(("fields", "param", "part"), BAD_CHATS, ids=lambda value: str(value)[:50])
async def test_chat_refuses_a_field(
    service: Service, router: FakeRouterClient, fields: dict[str, Any], param: str, part: str
) -> None:
    is_messages_case = not fields or "messages" in fields
    body = fields if is_messages_case else {"messages": [{"role": "user", "content": "a"}], **fields}
    status, answer = await service.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert part in answer["error"]["message"]
    assert router.requests == []


@pytest.mark.parametrize("value", [None, "", [], {}])
@pytest.mark.parametrize("name", ["tool_calls", "annotations", "function_call", "refusal"])
async def test_message_may_come_back_with_empty_fields(service: Service, name: str, value: object) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: value}]
    body = {"messages": [*history, {"role": "user", "content": "c"}]}
    assert (await service.post("/v1/chat/completions", body))[0] == 200
