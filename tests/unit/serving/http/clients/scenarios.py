"""What unmodified clients are asked to do, for the recordings of their requests.

The clients are given as they are, so that this file needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from tests.unit.serving.http.chat.models import MAY_REASON, chat_tokenizer
from tests.unit.serving.http.service import MODEL

Parsed = list[Any]
Scenario = Callable[[Any], Awaitable[Parsed]]
"""Calls a client, and returns what it made of each answer."""

CHUNK_SIZE = 3
"""Tokens that an event of a stream brings."""
QUESTION = "Weather in Rome?"
CALL = (
    '<think>Hm.</think>So:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
FORM = '{"city": "Rome"}'
TEXT = "<think>Hm.</think>Sunny, mostly."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class City(BaseModel):
    """Form of an answer."""

    city: str


def tokenizer() -> Any:
    """The model of all recordings: it may reason, and calls tools."""
    return chat_tokenizer(MAY_REASON)


async def chat_parse(client: Any) -> Parsed:
    return [
        await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=City
        )
    ]


async def chat_tools(client: Any) -> Parsed:
    function = {"name": "get_weather", "parameters": PARAMETERS}
    asked: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await client.chat.completions.create(**asked, messages=messages)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = await client.chat.completions.create(**asked, messages=[*messages, message, result])
    return [first, second]


async def responses_create(client: Any) -> Parsed:
    return [
        await client.responses.create(
            model=MODEL, instructions="Be brief.", input=QUESTION, max_output_tokens=200, store=False
        )
    ]


async def responses_stream(client: Any) -> Parsed:
    return [
        [event async for event in await client.responses.create(model=MODEL, input=QUESTION, stream=True)]
    ]


async def responses_tools(client: Any) -> Parsed:
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "tools": [tool]}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await client.responses.create(**asked, input=items)
    items += first.output
    call = next(item for item in first.output if item.type == "function_call")
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    return [first, await client.responses.create(**asked, input=items)]


async def responses_parse(client: Any) -> Parsed:
    parsed = await client.responses.parse(model=MODEL, input=QUESTION, text_format=City)
    assert parsed.output_parsed == City(city="Rome")
    return [parsed]


async def messages_create(client: Any) -> Parsed:
    return [
        await client.messages.create(
            model=MODEL,
            max_tokens=200,
            system="Be brief.",
            messages=[{"role": "user", "content": QUESTION}],
            stop_sequences=["mostly"],
        )
    ]


async def messages_stream(client: Any) -> Parsed:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    async with client.messages.stream(model=MODEL, **asked, tools=[tool]) as stream:
        return [await stream.get_final_message()]


async def messages_tools(client: Any) -> Parsed:
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await client.messages.create(**asked, messages=messages, tool_choice={"type": "auto"})
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return [first, await client.messages.create(**asked, messages=[*messages, *turns])]


async def messages_parse(client: Any) -> Parsed:
    messages = [{"role": "user", "content": QUESTION}]
    parsed = await client.messages.parse(model=MODEL, max_tokens=200, messages=messages, output_format=City)
    assert parsed.parsed_output == City(city="Rome")
    return [parsed]


async def messages_count(client: Any) -> Parsed:
    messages = [{"role": "user", "content": QUESTION}]
    return [await client.messages.count_tokens(model=MODEL, messages=messages)]


SCENARIOS: dict[str, tuple[str, str, Scenario]] = {
    "chat_parse": ("openai", FORM, chat_parse),
    "chat_tools": ("openai", CALL, chat_tools),
    "responses_create": ("openai", TEXT, responses_create),
    "responses_stream": ("openai", TEXT, responses_stream),
    "responses_tools": ("openai", CALL, responses_tools),
    "responses_parse": ("openai", FORM, responses_parse),
    "messages_create": ("anthropic", TEXT, messages_create),
    "messages_stream": ("anthropic", CALL, messages_stream),
    "messages_tools": ("anthropic", CALL, messages_tools),
    "messages_parse": ("anthropic", FORM, messages_parse),
    "messages_count": ("anthropic", TEXT, messages_count),
}
"""Name -> the client, what the model writes, and the calls."""


def stable(value: Any) -> Any:
    """A decoded answer without what differs from call to call: ids, times and the fingerprint."""
    if isinstance(value, list):
        return [stable(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {name: _stable_field(name, entry) for name, entry in value.items()}


def _stable_field(name: str, value: Any) -> Any:
    if name in ("id", "call_id", "item_id", "tool_use_id", "tool_call_id") and isinstance(value, str):
        prefix, _, rest = value.replace("-", "_").partition("_")
        if not rest:
            return "call00000"
        _, _, place = rest.partition("_")
        return f"{prefix}_{place}"
    if name in ("created", "created_at"):
        return 0
    return "fp" if name == "system_fingerprint" else stable(value)


def decoded(answer: str) -> Any:
    """A whole answer, or the events of a stream."""
    if not answer.startswith(("event: ", "data: ")):
        return stable(json.loads(answer))
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    return [stable(json.loads(line)) for line in lines if line != "[DONE]"]
