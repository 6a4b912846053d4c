"""Fields and tools that agents and gateways add: left out, named, or refused; and lines of events."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from specray.config import parse_config
from tests.unit.serving.http.agents.asking import (
    APIS,
    CHAT,
    MESSAGES,
    RESPONSES,
    answered,
    conversation,
    prompt_of,
)
from tests.unit.serving.http.chat.models import HERMES, PLAIN, chat_tokenizer, saying
from tests.unit.serving.http.service import MODEL, serving

USER = {"role": "user", "content": "hi"}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
OTHERS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "apply_patch", "description": "Edits files."},
    {"type": "namespace", "name": "mcp", "tools": [SHELL]},
    {"type": "local_shell"},
    {"type": "a\nb", "name": "é" * 100},
]
NAMES = f"web_search, custom:apply_patch, namespace:mcp, local_shell, a_b:{'_' * 64}"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tools_that_are_no_functions_are_left_out_and_named(
    is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chat_tokenizer(HERMES)
    router = saying(tokenizer, "Yes")
    body = {
        "input": "hi",
        "stream": is_stream,
        "tools": [OTHERS[0], SHELL, *OTHERS[1:], OTHERS[0]],
        "client_metadata": {"x-codex-installation-id": "0"},
    }
    with caplog.at_level(logging.INFO, "specray.serving.http"):
        async with (
            serving(router) as service,
            service.http.post(RESPONSES, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            assert response.headers["X-Left-Out-Tools"] == NAMES
            text = await response.text()
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        f"tools left out, which are no functions: {NAMES}"
    ]
    prompt = tokenizer.decode(router.requests[0].prompt_token_ids)
    assert "shell" in prompt and "web_search" not in prompt and "apply_patch" not in prompt
    answer = (
        json.loads(text.split("\n\n")[-2].split("data: ")[1])["response"] if is_stream else json.loads(text)
    )
    assert answer["tools"] == [SHELL]


LEFT_OUT: dict[str, tuple[list[Any], str]] = {
    CHAT: (
        [{"type": "custom", "custom": {"name": "apply_patch"}}, {"type": "web_search"}],
        "custom:apply_patch, web_search",
    ),
    RESPONSES: (
        [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
        "custom:apply_patch, web_search",
    ),
    MESSAGES: (
        [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        ],
        "web_search_20250305:web_search, computer_20250124:computer",
    ),
}


@pytest.mark.parametrize("unknown", ["refuse", "ignore"])
@pytest.mark.parametrize("path", APIS)
async def test_every_api_goes_without_tools_that_are_no_functions(path: str, unknown: str) -> None:
    tools, names = LEFT_OUT[path]
    tokenizer, body = chat_tokenizer(HERMES), {**conversation(path, USER), "max_tokens": 9}
    if path == RESPONSES:
        del body["max_tokens"]
    config = parse_config({"served_model_name": MODEL, "http": {"unknown_fields": unknown}})
    for functions in ([], [tool(path, "shell")]):
        router = saying(tokenizer, "Yes")
        async with (
            serving(router, config=config) as service,
            service.http.post(path, json={**body, "tools": [*tools, *functions]}) as response,
        ):
            assert response.status == 200, await response.text()
            assert response.headers["X-Left-Out-Tools"] == names
        prompt = tokenizer.decode(router.requests[0].prompt_token_ids)
        assert ("shell" in prompt) == bool(functions) and "search" not in prompt


async def test_without_functions_there_are_no_tools_and_without_others_no_header() -> None:
    # The template has no place for tools.
    async with serving(saying(PLAIN, "Yes")) as service:
        for tools in ([OTHERS[3]], []):
            body = {"input": "hi", "tools": tools, "tool_choice": "auto"}
            async with service.http.post(RESPONSES, json=body) as response:
                assert response.status == 200
                assert response.headers.get("X-Left-Out-Tools") == ("local_shell" if tools else None)


def tool(path: str, name: str) -> dict[str, Any]:
    if path == MESSAGES:
        return {"name": name, "input_schema": {"type": "object"}}
    if path == RESPONSES:
        return {"type": "function", "name": name}
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("path", APIS)
async def test_names_have_256_characters_and_requests_512_tools(path: str) -> None:
    tokenizer, body = chat_tokenizer(HERMES), conversation(path, USER)
    long = [tool(path, "mcp__" + "n" * 251)]
    assert "n" * 251 in await prompt_of(path, tokenizer, {**body, "tools": long})
    status, answer, _ = await answered(path, tokenizer, {**body, "tools": [tool(path, "n" * 257)]})
    assert status == 400 and "1..256 letters" in answer["error"]["message"]
    many = [tool(path, f"n{index}") for index in range(513)]
    # The prompt of so many is too long for this model; they are read, though.
    status, answer, _ = await answered(path, tokenizer, {**body, "tools": many[:512]})
    assert "context" in answer["error"]["message"] or "allowed: 1.." in answer["error"]["message"]
    status, answer, _ = await answered(path, tokenizer, {**body, "tools": many})
    assert status == 400 and "at most 512 tools" in answer["error"]["message"]


EXTRA = {"cache_control": {"type": "ephemeral"}, "opts": {"visible": False}}


async def test_unknown_fields_are_ignored_wherever_they_are() -> None:
    tokenizer, http = chat_tokenizer(HERMES), {"unknown_fields": "ignore"}
    function = {"name": "f", "parameters": {"type": "object"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "hi"}]

    def bodies(extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
        marked = [{**part, **extra} for part in parts]
        content = [{"role": "user", "content": marked, **extra}]
        calls = [{**call, "function": {**call["function"], **extra}, **extra}]  # type: ignore[dict-item]
        history = [{"role": "assistant", "content": "x", "tool_calls": calls, **extra}, *content]
        tools = [{"type": "function", "function": {**function, **extra}, **extra}]
        return {
            CHAT: {
                "messages": [*content, *history],
                "tools": tools,
                "prediction": {"type": "content", "content": marked, **extra},
                "response_format": {"type": "text", **extra},
                "stream_options": {**extra},
                "stream": False,
                **extra,
            },
            RESPONSES: {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi", **extra}], **extra}
                ],
                "tools": [{"type": "function", **function, **extra}],
                "text": {"format": {"type": "text", **extra}, **extra},
                "reasoning": {"effort": "low", **extra},
                **extra,
            },
            MESSAGES: {
                "messages": content,
                "system": marked,
                "tools": [{"name": "f", "input_schema": {"type": "object"}, **extra}],
                "tool_choice": {"type": "auto", **extra},
                "thinking": {"type": "disabled", **extra},
                **extra,
            },
        }

    with_extra, without = bodies(EXTRA), bodies({})
    for path in APIS:
        del_stream = {name: value for name, value in with_extra[path].items() if name != "stream_options"}
        plain = {name: value for name, value in without[path].items() if name != "stream_options"}
        prompt = await prompt_of(path, tokenizer, del_stream, http)
        assert prompt == await prompt_of(path, tokenizer, plain)
        status, answer, _ = await answered(path, tokenizer, del_stream)
        assert status == 400 and "is not" in answer["error"]["message"]


@pytest.mark.parametrize(
    "name", ["provider_specific_fields", "reasoning_details", "id", "cache_control", "opts"]
)
async def test_fields_that_gateways_add_to_messages_are_ignored_or_refused(name: str) -> None:
    tokenizer = chat_tokenizer(PLAIN)
    body = {"messages": [USER, {"role": "assistant", "content": "x", name: {"a": [1]}}, USER]}
    status, answer, _ = await answered(CHAT, tokenizer, body)
    assert (status, answer["error"]["param"]) == (400, f"messages[1].{name}")
    assert (await answered(CHAT, tokenizer, body, {"unknown_fields": "ignore"}))[0] == 200


@pytest.mark.parametrize("name", ["function_call", "audio"])
async def test_known_fields_of_messages_that_are_not_supported_are_refused_all_the_same(name: str) -> None:
    body = {"messages": [{"role": "assistant", "content": "x", name: {"id": "a"}}]}
    status, answer, _ = await answered(CHAT, chat_tokenizer(PLAIN), body, {"unknown_fields": "ignore"})
    assert (status, answer["error"]["param"]) == (400, f"messages[0].{name}")


SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"
PATHS = (*APIS, "/v1/completions")


@pytest.mark.parametrize("path", PATHS)
async def test_no_character_of_an_event_ends_its_line(path: str) -> None:
    body = {"prompt": "a"} if path == PATHS[-1] else conversation(path, USER)
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with (
        serving(saying(PLAIN, SEPARATORS)) as service,
        service.http.post(path, json={**body, limit: 80, "stream": True}) as response,
    ):
        text = (await response.read()).decode()
    lines = [line for line in text.splitlines() if line]
    assert lines and not [line for line in lines if not line.startswith(("data: ", "event: "))]
    told = json.dumps([json.loads(line[6:]) for line in lines if line.startswith("data: {")])
    assert all(json.dumps(mark)[1:-1] in told for mark in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_structured_outputs_bind_the_answer_of_every_api(path: str) -> None:
    router = saying(HERMES, "red")
    async with serving(router) as service:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "hi"}],
            "input": "hi",
            "max_tokens": 8,
        }
        body = body | {"model": MODEL, "structured_outputs": {"choice": ["red", "blue"]}}
        del body["input" if "messages" in path else "messages"]
        if "responses" in path:
            body["max_output_tokens"] = body.pop("max_tokens")
        async with service.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
    assert router.requests[-1].sampling.grammar is not None
