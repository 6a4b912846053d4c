"""Requests as unmodified clients send them, answered exactly as when the clients read the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.serving.http.chat.models import saying
from tests.unit.serving.http.clients.record import RECORDED, record_scenario
from tests.unit.serving.http.clients.scenarios import CHUNK_SIZE, SCENARIOS, decoded, tokenizer
from tests.unit.serving.http.service import serving

RECORDINGS: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
ADDED_BY_CLIENTS = ("parsed", "parsed_arguments", "parsed_output")
"""Fields that a client's helpers add to what they read."""
ADDED_AS_NULL = (("tool_calls", None), ("stop_details", None))
"""Fields that they add as null."""


def test_every_scenario_is_recorded() -> None:
    assert set(RECORDINGS) == set(SCENARIOS)


@pytest.mark.parametrize("name", RECORDINGS)
async def test_recorded_request_is_answered_as_it_was(name: str) -> None:
    _, text, _ = SCENARIOS[name]
    router = saying(tokenizer(), text, chunk_size=CHUNK_SIZE)
    async with serving(router) as service:
        for exchange in RECORDINGS[name]["exchanges"]:
            body = json.dumps(exchange["body"])
            async with service.http.post(
                exchange["path"], data=body, headers=exchange["headers"]
            ) as response:
                assert response.status == 200
                assert decoded(await response.text()) == exchange["answer"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_clients_read_all_of_the_answer(name: str) -> None:
    for exchange in RECORDINGS[name]["exchanges"]:
        answer, parsed = exchange["answer"], without_added(exchange["parsed"])
        if name == "messages_stream":
            answer = put_together(answer)
        assert parsed == answer


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario[0] == "openai"])
async def test_installed_openai_sends_and_reads_what_is_recorded(name: str) -> None:
    now = await record_scenario(*SCENARIOS[name])
    for exchange, recorded in zip(now["exchanges"], RECORDINGS[name]["exchanges"], strict=True):
        assert exchange["body"] == recorded["body"]
        assert without_added(exchange["parsed"]) == without_added(recorded["parsed"])


def without_added(value: Any) -> Any:
    if isinstance(value, list):
        return [without_added(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {
        name: without_added(entry)
        for name, entry in value.items()
        if name not in ADDED_BY_CLIENTS and (name, entry) not in ADDED_AS_NULL
    }


def put_together(events: list[Any]) -> dict[str, Any]:
    """The message of a stream of Anthropic's API."""
    message: dict[str, Any] = events[0]["message"]
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            if block["type"] == "tool_use":
                block["input"], arguments = json.loads(arguments), ""
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message
