"""Bodies made of the OpenAPI document, valid ones and spoiled ones: none ends in an error of the service.

A short run of what ``make fuzz`` does with schemathesis and a real service.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from specray.serving.http.routes.openapi import openapi_document
from tests.unit.serving.http.service import MODEL, say, serving

NUM_CASES = 40
"""Cases of each path."""
DOCUMENT = openapi_document(asks_for_key=False)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
EXAMPLES = {
    path: (content["application/json"]["schema"], content["application/json"]["example"])
    for path, methods in DOCUMENT["paths"].items()
    if (content := methods.get("post", {}).get("requestBody", {}).get("content"))
}
DEEP: Any = json.loads("[" * 50 + "]" * 50)
SPOILED: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**64, 2**70, 1e308, float("nan"), float("inf"), 0.5),
    *("", "a", "\x00", "\ud800", "é\u202e", "a" * 3000, [], [None], {}, {"": None}, {"a": {"b": []}}, DEEP),
)
WORDS = (*("user", "assistant", "tool", "system", "text", "function", "auto", "json_object", MODEL), "a", "1")
KEYS = ("type", "name", "role", "content", "text", "function", "parameters", "schema", "json", "regex", "id")
"""Fields that objects without a schema may mean something by."""


class Bodies:
    """Makes bodies of a schema; most of their values are valid by it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self, schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
        """Returns the example with a few fields of the schema, or a body of the schema alone."""
        made = self._object(SCHEMAS[schema["$ref"].rpartition("/")[2]], share=self._random.uniform(0, 0.2))
        return made if self._random.random() < 0.1 else {**made, **example, **self._some(made)}

    def _some(self, made: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in made.items() if self._random.random() < 0.5}

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        if self._random.random() < 0.08:
            return self._random.choice(SPOILED)
        if "$ref" in schema:
            return self._object(SCHEMAS[schema["$ref"].rpartition("/")[2]], share=0.3, depth=depth)
        if "anyOf" in schema:
            return self._value(self._random.choice(schema["anyOf"]), depth)
        if "const" in schema or "enum" in schema:
            return self._random.choice(schema.get("enum", [schema.get("const")]))
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        match schema.get("type"):
            case "object":
                return self._object(schema, share=0.3, depth=depth)
            case "array":
                return [
                    self._value(schema.get("items", {}), depth + 1) for _ in range(self._random.randrange(3))
                ]
            case "string":
                return self._random.choice(WORDS)
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
            case "integer" | "number" as kind:
                return self._number(schema, is_whole=kind == "integer")
            case _:
                return self._anything(depth)

    def _number(self, schema: dict[str, Any], *, is_whole: bool) -> float:
        low, high = schema.get("minimum", 0), min(schema.get("maximum", 8), 2**63)
        number = self._random.choice((low, high, self._random.uniform(low, high), 1, 2))
        return int(number) if is_whole else number

    def _object(self, schema: dict[str, Any], *, share: float, depth: int = 0) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        return {
            name: self._value(entry, depth + 1)
            for name, entry in schema.get("properties", {}).items()
            if name in required or self._random.random() < share
        }

    def _anything(self, depth: int) -> Any:
        if depth > 4 or self._random.random() < 0.3:
            return self._random.choice((*SPOILED, *WORDS))
        entries = [self._anything(depth + 1) for _ in range(self._random.randrange(3))]
        if self._random.random() < 0.4:
            return entries
        return {self._random.choice(KEYS): entry for entry in entries}


@pytest.mark.parametrize("path", EXAMPLES)
async def test_no_body_ends_in_an_error_of_the_service(path: str) -> None:
    bodies, statuses = Bodies(seed=1), Counter[int]()
    schema, example = EXAMPLES[path]
    async with serving(say("hello")) as service:
        for _ in range(NUM_CASES):
            body = bodies.body(schema, example)
            data = json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            async with service.http.post(path, data=data, headers=headers) as response:
                text = await response.text()
            # What asks for a deadline may miss it.
            assert response.status < 500 or (response.status == 504 and "timeout_s" in body), (text, data)
            assert "internal" not in text, (text, data)
            statuses[response.status] += 1
    assert statuses[200] > 0 and statuses[400] > 0, statuses
