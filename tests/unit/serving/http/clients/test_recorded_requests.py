"""Requests that unmodified client libraries sent through ``make clients RECORD=FILE``, sent again.

The server called its model ``recorded`` and had a chat template that shows tools. Requests of lm_eval, which
are token ids, are recorded elsewhere.
"""

from __future__ import annotations

import json
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
    async with serving(saying(tokenizer(), "Sunny, mostly."), tokenizer=tokenizer()) as service:
        for request in (request for request in REQUESTS if request["client"] == client):
            path = request["path"].replace(request["model"], MODEL)
            body = served(request["body"], request["model"])
            async with service.http.request(request["method"], path, json=body) as response:
                assert (path, response.status) == (path, request["status"]), await response.text()
