"""Requests that unmodified client libraries sent through ``make clients RECORD=FILE``, sent again.

The server called its model ``recorded`` and had a chat template that shows tools. Requests of lm_eval, which
are token ids, are recorded elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serving.http.chat.models import saying
from tests.unit.serving.http.clients.scenarios import tokenizer
from tests.unit.serving.http.service import MODEL, serving

REQUESTS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("recorded_requests.json").read_text(encoding="utf-8")
)
CLIENTS = {
    "anthropic",
    "instructor",
    "langchain-openai",
    "litellm",
    "litellm-proxy",
    "openai",
    "vllm-bench",
}


AGENTS: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("recorded_agents.json").read_text(encoding="utf-8")
)
"""What coding agents sent while each called a tool and edited a file; ``record_agents`` writes it."""
ENDS = ("[DONE]", "response.completed", "message_stop", '"stop_reason":"end_turn"')
"""What the end of a whole answer or stream has."""


def served(value: Any, model: str) -> Any:
    """The value with the model of this service in place of the one that was asked then."""
    if isinstance(value, dict):
        return {name: served(entry, model) for name, entry in value.items()}
    if isinstance(value, list):
        return [served(entry, model) for entry in value]
    return MODEL if value == model else value


def test_every_client_is_recorded() -> None:
    assert {request["client"] for request in REQUESTS} == CLIENTS


@pytest.mark.parametrize("client", sorted(CLIENTS))
async def test_requests_of_a_client_are_answered_with_the_same_status(client: str) -> None:
    async with serving(saying(tokenizer(), "Sunny, mostly.")) as service:
        for request in (request for request in REQUESTS if request["client"] == client):
            path = request["path"].replace(request["model"], MODEL)
            body = served(request["body"], request["model"])
            async with service.http.request(request["method"], path, json=body) as response:
                assert (path, response.status) == (path, request["status"]), await response.text()


@pytest.mark.parametrize("agent", ["claude-code", "codex", "opencode"])
async def test_requests_of_an_agent_are_answered_to_the_end_of_its_work(agent: str) -> None:
    requests = AGENTS[agent]
    assert len(requests) >= 3, "a call, an edit, and the last words"
    router = saying(tokenizer(), "Sunny, mostly.")
    router.info = replace(router.info, max_model_len=32_768)
    async with serving(router) as service:
        for request in requests:
            body = served(request["body"], request["model"])
            async with service.http.request(request["method"], request["path"], json=body) as response:
                text = await response.text()
                assert (request["status"], response.status) == (200, 200), text
                assert any(end in text for end in ENDS), text
