"""The OpenAPI document: served by option, complete, and its references lead somewhere."""

from __future__ import annotations

import json
import re
from typing import Any

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from specray.serving.http.routes.openapi import openapi_document
from tests.unit.serving.http.service import INFO, MODEL, say, serving


async def test_document_is_served_by_option_alone() -> None:
    for is_on, status in [(False, 404), (True, 200)]:
        config = parse_config({"served_model_name": MODEL, "http": {"openapi": is_on}})
        async with (
            serving(FakeRouterClient(info=INFO), config=config) as service,
            service.http.get("/openapi.json") as response,
        ):
            assert response.status == status
    assert "securitySchemes" not in openapi_document(asks_for_key=False)["components"]
    assert openapi_document(asks_for_key=True)["security"] == [{"key": []}, {"header": []}]


async def test_examples_are_answered() -> None:
    document = openapi_document(asks_for_key=False)
    examples = {
        path: content["application/json"]["example"]
        for path, methods in document["paths"].items()
        if (content := methods.get("post", {}).get("requestBody", {}).get("content"))
    }
    assert len(examples) == 7
    async with serving(say("hello")) as service:
        for path, body in examples.items():
            status, answer = await service.post(path, body)
            assert status == 200, (path, answer)


def test_references_lead_to_schemas() -> None:
    document = openapi_document(asks_for_key=False)
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(names) <= set(document["components"]["schemas"])
    assert {"CompletionRequest", "ChatCompletionRequest", "StreamOptions"} <= set(names)
    assert {"ResponsesRequest", "MessagesRequest", "CountTokensRequest", "Error", "AnthropicError"} <= set(
        names
    )


def test_fields_have_their_ranges() -> None:
    schemas = openapi_document(asks_for_key=False)["components"]["schemas"]
    fields: dict[str, Any] = schemas["CompletionRequest"]["properties"]
    number, _ = fields["temperature"]["anyOf"]
    assert number == {"type": "number", "minimum": 0, "maximum": 2}
    number, _ = fields["top_p"]["anyOf"]
    assert number == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert "response_format" in fields
    assert schemas["ChatCompletionRequest"]["properties"]["logprobs"]["anyOf"][0] == {"type": "boolean"}


async def test_every_path_of_the_document_is_there() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for path, operations in openapi_document(asks_for_key=False)["paths"].items():
            (method,) = operations
            async with service.http.request(method, path, json={}) as response:
                assert response.status not in (404, 405), path
