"""Messages that are refused: in Anthropic's form, and each by its own field."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from tests.unit.serving.http.chat.models import HERMES, PLAIN, saying
from tests.unit.serving.http.service import MODEL, Service, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/messages"
USER = [{"role": "user", "content": "Weather?"}]
CLOCK: dict[str, Any] = {"type": "custom", "name": "clock", "input_schema": {"type": "object"}}

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "messages[0].content[0].name",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"temperature": 9}, "temperature"),
    ({"tools": [{"type": 3, "name": "web_search", "input_schema": {}}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": "auto"}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
        "disable_parallel_tool_use",
    ),
    ({"thinking": {"type": "x"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "display": "x"}}, "thinking.display"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ({"output_config": {"x": 1}}, "output_config.x"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"context_management": {"edits": [{}]}}, "context_management"),
    ({"stop": ["a"]}, "stop"),
    ({"n": 2}, "n"),
]


def make_router() -> FakeRouterClient:
    return saying(HERMES, "a")


@pytest.mark.parametrize(("fields", "name"), REFUSALS, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_done_is_refused_in_anthropics_form_by_its_own_field(
    service: Service, router: FakeRouterClient, fields: dict[str, Any], name: str
) -> None:
    status, answer = await service.post(PATH, {"messages": USER, "max_tokens": 5, **fields})
    assert (status, answer["type"], router.requests) == (400, "error", [])
    assert answer["error"]["type"] == "invalid_request_error"
    assert name in answer["error"]["message"]


async def test_fields_that_ask_for_nothing_are_answered() -> None:
    fields: dict[str, Any] = {
        "mcp_servers": [],
        "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "speed": "standard",
        "service_tier": "auto",
    }
    async with serving(saying(PLAIN, "a")) as service:
        status, _ = await service.post(
            PATH, {"messages": USER, "max_tokens": 5, **fields, "cache_control": {"type": "ephemeral"}}
        )
    assert status == 200


async def test_unknown_fields_are_ignored_where_that_is_configured_but_not_what_is_known() -> None:
    lenient = parse_config({"served_model_name": MODEL, "http": {"unknown_fields": "ignore"}})
    body = {"messages": USER, "max_tokens": 5, "new_field": 1}
    async with serving(saying(PLAIN, "a"), config=lenient) as service:
        assert (await service.post(PATH, body))[0] == 200
        status, answer = await service.post(PATH, {**body, "container": "c"})
        assert (status, answer["error"]["message"][:9]) == (400, "container")
