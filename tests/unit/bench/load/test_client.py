"""Tests of the client's event parser, also with lines as other servers write them."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from specray.bench.load.client import ServerClient, parse_event
from specray.errors import SpecrayError


@pytest.mark.parametrize(
    "line", [b"\n", b": keep-alive\n", b":\n", b"event: x\n", b"data: [DONE]\n", b"data:\n"]
)
def test_what_is_no_event_is_passed_over(line: bytes) -> None:
    assert parse_event(line) is None


def test_an_event_is_its_json() -> None:
    event = parse_event(b'data: {"choices": [{"text": "a"}]}\n')
    assert event is not None and event.text == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'data: {"error": {"message": "full"}}\n', "full"),
        (b'error: {"code": 500, "message": "lost"}\n', "lost"),
        (b"data: half an ev\n", "not JSON: b'half an ev'"),
    ],
)
def test_an_error_ends_the_request_and_nothing_else(line: bytes, message: str) -> None:
    with pytest.raises(SpecrayError, match=message):
        parse_event(line)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        ({"data": [{"id": "a", "max_model_len": 64}, {"id": "b", "max_model_len": 32}]}, 64),
        ({"data": [{"id": "a"}]}, None),
        ({"data": []}, SpecrayError),
        ({"data": [{"id": "a", "max_model_len": "long"}]}, SpecrayError),
    ],
)
async def test_the_context_is_that_of_the_first_model_or_is_not_told(
    body: object, length: int | type[SpecrayError] | None
) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server, ServerClient(str(server.make_url("/"))) as client:
        if length is SpecrayError:
            with pytest.raises(SpecrayError, match="/v1/models is no list of models"):
                await client.max_model_len()
        else:
            assert await client.max_model_len() == length


async def test_a_client_of_an_adapter_asks_for_it_where_a_body_names_no_model() -> None:
    asked: list[str | None] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append((await request.json()).get("model"))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server:
        for model in ("sql", ""):
            async with ServerClient(str(server.make_url("/")), model=model) as client:
                await client.complete({"prompt": "a"})
                await client.complete({"prompt": "a", "model": "other"})
    assert asked == ["sql", "other", None, "other"]
