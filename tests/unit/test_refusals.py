"""Refusals that cost next to nothing, deadlines as a header, and the ingress's own HTTP server."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from http_service import INFO, MODEL, REPLY, TOKENIZER, endless, say, serving, wait_until

from specray.config import parse_config
from specray.errors import ConfigError, InvalidRequestError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.serving import refusals
from specray.serving.http import build_http_app
from specray.serving.http_server import HttpServer
from specray.serving.refusals import HOLD_S, HeldRefusals, RefusingClient
from specray.serving.timeout_header import with_timeout
from specray.types import GenerateRequest, SamplingParams, SpeculationParams

TEXT = {"prompt": "a", "max_tokens": 4}
FULL = OverloadedError("256 requests wait; allowed: 256", retry_after_s=7.0)


def request(tenant: str = "", priority: int = 0) -> GenerateRequest:
    speculation = SpeculationParams(tenant=tenant)
    return GenerateRequest("r", (1,), SamplingParams(), 4, speculation=speculation, priority=priority)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_refusal_of_a_router_is_repeated_for_its_tenant_and_what_is_no_more_urgent(
    is_stream: bool,
) -> None:
    now = 100.0
    router = FakeRouterClient(info=INFO, errors=[FULL])
    client = RefusingClient(router, HeldRefusals(lambda: now))

    async def is_asked(one: GenerateRequest) -> bool:
        num_before = len(router.requests)
        try:
            if is_stream:
                _ = [chunk async for chunk in client.stream(one)]
            else:
                await client.complete(one)
        except OverloadedError as error:
            assert (error.message, error.retry_after_s) == (FULL.message, FULL.retry_after_s)
        return len(router.requests) > num_before

    assert await is_asked(request(priority=3)), "the one that is refused"
    now += 0.99 * HOLD_S
    assert not await is_asked(request(priority=3))
    assert not await is_asked(request(priority=4))
    assert await is_asked(request(priority=2))
    assert await is_asked(request(tenant="other", priority=4))
    now += 0.02 * HOLD_S
    assert await is_asked(request(priority=4)), "after a blink the router is asked again"


async def test_refused_call_over_http_is_not_tokenised_while_the_refusal_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "HOLD_S", 1000.0)
    router = FakeRouterClient(info=INFO, errors=[FULL])
    async with serving(router) as service:
        assert (await service.post("/v1/completions", TEXT))[0] == 429
        # A prompt that is too long would be a 400, if anybody had looked.
        status, answer = await service.post("/v1/completions", {**TEXT, "prompt": "x" * 500})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert len(router.requests) == 1
        assert (await service.post("/v1/completions", {**TEXT, "priority": -1}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_in_hand_are_bounded_before_their_body_is_read(stream: bool) -> None:
    router = endless()
    config = parse_config({"served_model_name": MODEL, "ingress": {"max_ongoing_requests": 1}})
    async with serving(router, config=config) as service:
        running = asyncio.create_task(service.post("/v1/completions", {**TEXT, "stream": stream}))
        await wait_until(lambda: len(router.requests) == 1)
        async with service.http.post("/v1/completions", data=b"{no json" * 1000) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["message"] == "1 calls are in hand; allowed: 1"
        # The connection is still good, and a full service can be asked how it is.
        assert (await service.http.get("/health")).status == 200
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await wait_until(lambda: len(router.aborted_request_ids) == 1)
        # The place is free again: the body is read, and is found wrong.
        assert (await service.post("/v1/completions", {"prompt": 5}))[0] == 400


# X-Request-Timeout-Seconds


@pytest.mark.parametrize(
    ("header", "own", "got"),
    [
        (None, 3, 3),
        ("2.5", None, 2.5),
        ("2.5", 3, 2.5),
        ("2.5", 2, 2),
        ("0", None, None),
        ("-1", 3, 3),
        ("inf", None, 86_400),
        ("1e9", None, 86_400),
        ("2.5", "x", "x"),
    ],
)
def test_header_and_field_together_mean_the_shorter_time(header: str | None, own: Any, got: Any) -> None:
    headers = {} if header is None else {"X-Request-Timeout-Seconds": header}
    values = {"prompt": "a"} if own is None else {"prompt": "a", "timeout_s": own}
    result = with_timeout(values, headers)
    assert isinstance(result, dict)
    assert result.get("timeout_s") == got


@pytest.mark.parametrize("text", ["soon", "nan", ""])
def test_header_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="X-Request-Timeout-Seconds") as caught:
        with_timeout({}, {"X-Request-Timeout-Seconds": text})
    assert caught.value.field == "X-Request-Timeout-Seconds"


async def test_header_reaches_the_router() -> None:
    router = say(REPLY)
    async with serving(router) as service:
        headers = {"X-Request-Timeout-Seconds": "12"}
        async with service.http.post("/v1/completions", json=TEXT, headers=headers) as response:
            assert response.status == 200
    assert router.requests[0].timeout_s == 12.0


# A server of its own


def http_server(router: FakeRouterClient, port: int = 0) -> HttpServer:
    config = parse_config({"served_model_name": MODEL})
    app = build_http_app(client=router, tokenizer=TOKENIZER, config=config)
    return HttpServer(app, host="127.0.0.1", port=port)


async def test_server_streams_and_ends_with_its_connections() -> None:
    server = http_server(say(REPLY))
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json={**TEXT, "stream": True}) as response:
            assert response.status == 200
            lines = [line async for line in response.content if line.startswith(b"data: {")]
    finally:
        await server.stop()
    assert json.loads(lines[-1][6:])["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)
    await server.stop()


async def test_two_replicas_may_share_a_port() -> None:
    first, second = http_server(say(REPLY)), http_server(say(REPLY))
    await first.start()
    second = http_server(say(REPLY), first.port)
    await second.start()
    await first.stop()
    async with aiohttp.ClientSession() as http:
        assert (await http.get(f"http://127.0.0.1:{second.port}/health")).status == 200
    await second.stop()


async def test_port_of_another_program_is_a_config_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match=r"http\.port: cannot listen on 127\.0\.0\.1"),
    ):
        await http_server(say(REPLY), other.getsockname()[1]).start()
    with pytest.raises(ConfigError, match=r"http\.host"):
        await HttpServer(build_http_app_stub(), host="no.such.host.invalid", port=0).start()


def build_http_app_stub() -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody calls")

    return app
