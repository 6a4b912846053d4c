"""Tests of structured output at the endpoints: what reaches the router, and what is refused in time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.fakes import FakeRouterClient
from specray.grammar.forms import WHITESPACE
from specray.types import Grammar, GrammarKind
from tests.unit.serving.http.service import INFO, MODEL, TOKENIZER, serving

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
AS_GRAMMAR = Grammar(
    GrammarKind.JSON_SCHEMA, json.dumps({**SCHEMA, "x-guidance": {"whitespace_pattern": WHITESPACE}})
)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
        (
            "/v1/completions",
            {
                "prompt": "a",
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            },
        ),
    ],
)
async def test_the_grammar_reaches_the_router(path: str, fields: dict[str, Any]) -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        status, _ = await service.post(path, {"model": MODEL, "max_tokens": 2, **fields})
    assert status == 200
    assert [request.sampling.grammar for request in router.requests] == [AS_GRAMMAR]


async def test_free_text_has_no_grammar() -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "response_format": {"type": "text"}}
        assert (await service.post("/v1/completions", body))[0] == 200
    assert [request.sampling.grammar for request in router.requests] == [None]


async def test_a_hostile_schema_is_refused_and_names_its_field() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(12):
        schema = {"anyOf": [schema, {"type": "string", "not": {}}]}
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        status, answer = await service.post(
            "/v1/completions", {"model": MODEL, "prompt": "a", "guided_json": schema}
        )
    assert (status, answer["error"]["param"]) == (400, "guided_json")
    assert router.requests == []


async def test_tokenizer_that_cannot_serve_grammars_is_the_callers_problem_and_no_500(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(TOKENIZER), "spells_bytes", False)
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        status, answer = await service.post("/v1/completions", {"prompt": "a", "guided_regex": "a+"})
    assert (status, answer["error"]["param"]) == (400, "guided_regex")
    assert answer["error"]["message"].startswith(
        "guided_regex cannot be enforced with this model's tokenizer: its tokens are not bytes of the text"
    )
    assert router.requests == []
