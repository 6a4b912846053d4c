"""Bodies of other APIs, spoiled at random: refused by their own fields or translated; never a crash."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.chat.translation import Renames, renamed
from specray.serving.http.messages_api.calls import RENAMES as OF_MESSAGES
from specray.serving.http.messages_api.schema import MessagesRequest
from specray.serving.http.responses_api.calls import RENAMES as OF_RESPONSES
from specray.serving.http.responses_api.schema import ResponsesChat, ResponsesRequest
from specray.serving.http.schemas import parse_request

NUM_BODIES = 3000
SPOILS: list[Any] = [
    *(None, 0, -1, 1.5, True, False, "", "a", "auto", "none", "function", "text", "user", "assistant"),
    *([], {}, [[]], [{}], {"type": "text"}, {"type": []}, {"a": {}}, ["a"], 1e308, 10**30, "x" * 300),
]
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "tools": [FUNCTION],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {
        "format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True},
        "verbosity": "low",
    },
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "stop": ["a"],
    "max_output_tokens": 5,
    "chat_template_kwargs": {"a": 1},
    "speculation": {"enabled": True},
}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "z"}]}
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["a"],
    "context_management": {"edits": [{"keep": "all"}]},
}
APIS: dict[str, tuple[Any, type[ChatCompletionRequest], dict[str, Any], Renames]] = {
    "responses": (ResponsesRequest, ResponsesChat, RESPONSE, OF_RESPONSES),
    "messages": (MessagesRequest, ChatCompletionRequest, MESSAGE, OF_MESSAGES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", APIS)
def test_spoiled_bodies_are_refused_by_their_own_fields(name: str) -> None:
    schema, chat_schema, good, renames = APIS[name]
    translate(schema, chat_schema, good, renames)
    chance, num_refused = random.Random(32), 0
    for _ in range(NUM_BODIES):
        try:
            translate(schema, chat_schema, spoiled(good, chance), renames)
        except InvalidRequestError as error:
            num_refused += 1
            field = error.field or ""
            assert field.split(".")[0].split("[")[0] in good, error
            assert ".function" not in field and field.split("[")[0] in str(error)
    assert NUM_BODIES / 2 < num_refused < NUM_BODIES


def translate(
    schema: Any, chat_schema: type[ChatCompletionRequest], body: dict[str, Any], renames: Renames
) -> None:
    fields = parse_request(schema, body).chat()
    with renamed(renames):
        chat = parse_request(chat_schema, fields)
        chat.options()
        chat.chat()
        chat.tool_use()


def spoiled(good: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The body with one or two of its values replaced or left out."""
    body = copy.deepcopy(good)
    for _ in range(chance.randint(1, 2)):
        *before, last = chance.choice(list(paths_of(body)))
        holder: Any = body
        for step in before:
            holder = holder[step]
        if isinstance(holder, dict) and chance.random() < 0.15:
            del holder[last]
        else:
            holder[last] = chance.choice(SPOILS)
    return body


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Any:
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for step, entry in entries:
        yield (*path, step)
        yield from paths_of(entry, (*path, step))
