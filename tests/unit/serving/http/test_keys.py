"""Tests of API keys over HTTP and gRPC: who is let in, under which name, and how much at a time."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from specray.cli.generate import Sampling, from_server
from specray.errors import InvalidRequestError, NotAllowedError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import ServiceLevel
from specray.serving.admission.api_keys import Keyring, key_hash
from specray.serving.http.edge.keys import KeyMiddleware, check_manager
from specray.serving.http.edge.observe import ObserveMiddleware
from specray.serving.observe import CallObserver
from tests.unit.serving.http.key_entries import KEY, OTHER_KEY, config_with, key_entry
from tests.unit.serving.http.service import (
    INFO,
    MODEL,
    REPLY,
    Service,
    endless,
    say,
    serving,
    wait_until,
)
from tests.unit.tokenization.tiny_tokenizer import EOS

TEXT = {"prompt": "def", "max_tokens": 4}
PROMPT = "TheSecretPromptOfAUser"


def bearer(key: str) -> dict[str, str]:
    # Closed after each: a server closes the connection of a request that met a bug, without saying so.
    return {"Authorization": f"Bearer {key}", "Connection": "close"}


async def ask(
    service: Service, path: str = "/v1/completions", *, key: str | None = KEY, body: object = TEXT
) -> tuple[int, Any]:
    async with service.http.post(path, json=body, headers=bearer(key) if key else {}) as response:
        return response.status, await response.json()


async def get(service: Service, path: str, key: str | None = None) -> tuple[int, str]:
    async with service.http.get(path, headers=bearer(key) if key else {}) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        f"Bearer {KEY.upper()}",
        f"Bearer {key_hash(KEY)}",
        f"Bearer {OTHER_KEY}",
        f"Bearer {KEY} {KEY}",
        "Bearer " + "x" * 5000,
        "Bearer é",
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_wrong_key_gets_401_in_openais_form_and_reaches_nothing(authorization: str | None) -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router, config=config_with(key_entry())) as service:
        headers = {} if authorization is None else {"Authorization": authorization}
        for path in ("/v1/completions", "/v1/chat/completions", "/nowhere"):
            # What is wrong with the body is not said either.
            async with service.http.post(path, data=b"{", headers=headers) as response:
                answer = await response.json()
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == 'Bearer realm="specray"'
            error = answer["error"]
            assert error["type"] == "invalid_request_error"
            assert (error["param"], error["code"]) == (None, "invalid_api_key")
            assert KEY not in json.dumps(answer) and MODEL not in json.dumps(answer)
    assert router.requests == []


async def test_two_authorization_headers_are_refused() -> None:
    async with serving(FakeRouterClient(info=INFO), config=config_with(key_entry())) as service:
        headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER_KEY}")]
        async with service.http.get("/v1/models", headers=headers) as response:
            assert response.status == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_right_key_is_let_in(scheme: str) -> None:
    config = config_with(key_entry(OTHER_KEY, "other"), key_entry())
    async with serving(say(REPLY, then=(EOS,)), config=config) as service:
        headers = {"Authorization": f"{scheme} {KEY}"}
        async with service.http.post("/v1/completions", json=TEXT, headers=headers) as response:
            assert response.status == 200
        assert (await get(service, "/v1/models", KEY))[0] == 200


async def test_the_openai_client_works_with_a_key_and_sees_its_own_error_without() -> None:
    async with serving(say(REPLY, then=(EOS,)), config=config_with(key_entry())) as service:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0) as client:
            answer = await client.completions.create(model=MODEL, prompt="def", max_tokens=50)
            assert answer.choices[0].text == REPLY
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=OTHER_KEY, max_retries=0) as client:
            with pytest.raises(AuthenticationError, match="not known"):
                await client.completions.create(model=MODEL, prompt="def")


async def test_without_a_key_only_health_is_answered() -> None:
    async with serving(FakeRouterClient(info=INFO), config=config_with(key_entry())) as service:
        statuses = {
            path: (await get(service, path))[0]
            for path in (
                "/health",
                "/ready",
                "/metrics",
                "/debug/trace",
                "/version",
                "/v1/models",
                "/docs",
                "/",
            )
        }
    assert statuses == {
        "/health": 200,
        "/ready": 200,
        "/metrics": 401,
        "/debug/trace": 401,
        "/version": 401,
        "/v1/models": 401,
        "/docs": 401,
        "/": 401,
    }


async def test_who_asks_without_a_key_learns_not_why_the_service_is_not_ready() -> None:
    messages = []
    for config in (config_with(key_entry()), config_with()):
        async with serving(FakeRouterClient(info=INFO, is_ready=False), config=config) as service:
            status, text = await get(service, "/ready")
            assert status == 503
            messages.append(json.loads(text)["error"]["message"])
    assert messages == ["not ready", "the fake target is lost"]


async def test_metrics_need_a_key_that_may_observe() -> None:
    config = config_with(key_entry(), key_entry(OTHER_KEY, "prometheus", can_observe=True))
    async with serving(FakeRouterClient(info=INFO), config=config) as service:
        status, text = await get(service, "/metrics", KEY)
        assert (status, json.loads(text)["error"]["code"]) == (403, "not_allowed")
        assert (await get(service, "/debug/trace", KEY))[0] == 403
        assert (await get(service, "/metrics", OTHER_KEY))[0] == 200
        assert (await get(service, "/debug/trace", OTHER_KEY))[0] == 404


async def test_the_configuration_may_open_metrics() -> None:
    config = config_with(key_entry(), open_paths=["/metrics"])
    async with serving(FakeRouterClient(info=INFO), config=config) as service:
        assert (await get(service, "/metrics"))[0] == 200
        assert (await get(service, "/debug/trace"))[0] == 401


async def test_without_keys_in_the_configuration_everybody_is_let_in() -> None:
    async with serving(say(REPLY), config=config_with()) as service:
        assert (await ask(service, key=None))[0] == 200
        assert (await ask(service, key="whatever"))[0] == 200
        assert (await get(service, "/metrics"))[0] == 200


async def test_generate_and_bench_send_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_tokens=8, temperature=0, top_p=1.0, seed=3, stop=[], speculation=True)
    async with serving(say(REPLY), config=config_with(key_entry())) as service:
        monkeypatch.delenv("SPECRAY_API_KEY", raising=False)
        with pytest.raises(InvalidRequestError, match="answers 401: an API key is missing"):
            await anext(from_server(service.url, "def", sampling))
        monkeypatch.setenv("SPECRAY_API_KEY", KEY)
        assert (await anext(from_server(service.url, "def", sampling))).text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_keys_tenant_replaces_what_a_request_claims(stream: bool) -> None:
    router = say(REPLY)
    config = config_with(key_entry(), key_entry(OTHER_KEY, "b", tenant="b-tenant"))
    async with serving(router, config=config) as service:
        body = {**TEXT, "stream": stream, "speculation": {"tenant": "b-tenant"}}
        for key in (KEY, OTHER_KEY):
            headers = bearer(key)
            async with service.http.post("/v1/completions", json=body, headers=headers) as response:
                await response.read()
        await ask(service, body=TEXT)
    assert [request.speculation.tenant for request in router.requests] == ["team-a", "b-tenant", "team-a"]


@pytest.mark.parametrize(
    ("policy", "asked", "got"),
    [
        ({}, {}, (True, None)),
        ({}, {"num_speculative_tokens": 9}, (True, 9)),
        ({"enabled": False}, {"enabled": True}, (False, None)),
        ({}, {"enabled": False}, (False, None)),
        ({"num_speculative_tokens": 3}, {}, (True, 3)),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 9}, (True, 3)),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 2}, (True, 2)),
        ({"num_speculative_tokens": 0}, {"num_speculative_tokens": 2}, (True, 0)),
    ],
)
async def test_the_keys_policy_bounds_speculation(
    policy: dict[str, Any], asked: dict[str, Any], got: tuple[bool, int | None]
) -> None:
    router = say(REPLY)
    async with serving(router, config=config_with(key_entry(speculation=policy))) as service:
        assert (await ask(service, body={**TEXT, "speculation": asked}))[0] == 200
    speculation = router.requests[0].speculation
    assert (speculation.enabled, speculation.num_speculative_tokens) == got


@pytest.mark.parametrize(
    ("least", "asked", "got"),
    [(0, None, 0), (0, -3, 0), (0, 7, 7), (5, None, 5), (-5, None, 0), (-5, -9, -5)],
)
async def test_key_bounds_how_urgent_its_requests_are(least: int, asked: int | None, got: int) -> None:
    router = say(REPLY)
    async with serving(router, config=config_with(key_entry(min_priority=least))) as service:
        assert (await ask(service, body={**TEXT, "priority": asked, "timeout_s": 2.5}))[0] == 200
    assert router.requests[0].priority == got


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_a_time_are_bounded_and_given_back(stream: bool) -> None:
    router = endless()
    config = config_with(key_entry(max_requests=2), key_entry(OTHER_KEY, "other"))
    async with serving(router, config=config) as service:
        body = {**TEXT, "stream": stream}
        running = [asyncio.create_task(ask(service, body=body)) for _ in range(2)]
        await wait_until(lambda: len(router.requests) == 2)
        async with service.http.post("/v1/completions", json=TEXT, headers=bearer(KEY)) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            message = (await response.json())["error"]["message"]
        assert message == "key 'team-a' has 2 requests in hand; allowed: 2"
        # Others are not concerned.
        other = asyncio.create_task(ask(service, key=OTHER_KEY))
        await wait_until(lambda: len(router.requests) == 3)
        for task in (*running, other):
            task.cancel()
        await asyncio.gather(*running, other, return_exceptions=True)
        await wait_until(lambda: len(router.aborted_request_ids) == 3)
        again = asyncio.create_task(ask(service, body={**TEXT, "n": 2}))
        await wait_until(lambda: len(router.requests) == 5)
        again.cancel()


async def test_one_call_over_the_bound_is_a_mistake_not_an_overload() -> None:
    router = say(REPLY)
    async with serving(router, config=config_with(key_entry(max_requests=2))) as service:
        status, answer = await ask(service, body={**TEXT, "prompt": ["a", "b"], "n": 2})
        assert (status, answer["error"]["param"]) == (400, "n")
        assert answer["error"]["message"] == "number of prompts times n is 4; allowed for this key: 1..2"
        assert router.requests == []
        assert (await ask(service, body={**TEXT, "prompt": ["a", "b"]}))[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_stays_in_hand_after_a_request_that_fails(stream: bool) -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("full"), RuntimeError("a bug")])
    async with serving(router, config=config_with(key_entry(max_requests=1))) as service:
        body = {**TEXT, "stream": stream}
        statuses = []
        for _ in range(4):
            async with service.http.post("/v1/completions", json=body, headers=bearer(KEY)) as response:
                statuses.append(response.status)
                await response.read()
    assert statuses == [429, 500, 200, 200]


async def test_grpc_and_http_share_a_keyring() -> None:
    keyring = Keyring(config_with(key_entry(max_requests=1)).auth)
    assert keyring.identify([f"Bearer {KEY}"]) is keyring.identify([f"bearer {KEY}"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_neither_prompts_nor_keys_are_ever_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], path: str, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    errors = [RuntimeError("a bug"), OverloadedError("full")]
    router = FakeRouterClient(info=INFO, errors=errors)
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    async with serving(router, config=config_with(key_entry())) as service:
        body = {**prompt, "max_tokens": 4, "stream": stream}
        for key, status in ((KEY, 500), (KEY, 429), (KEY, 200), (OTHER_KEY, 401), (KEY, 400)):
            if status == 400:
                body["temperature"] = 9
            async with service.http.post(path, json=body, headers=bearer(key)) as response:
                assert response.status == status
                await response.read()
    out, err = capfd.readouterr()
    logged = caplog.text + out + err
    assert "a bug" in logged  # What fails is logged; that is what must not tell the prompt.
    for secret in (PROMPT, KEY, OTHER_KEY):
        assert secret not in logged


@pytest.mark.parametrize(
    ("own", "asked", "got"),
    [
        ({}, {"itl_ms": 30}, ServiceLevel(None, 30.0)),
        ({"ttft_ms": 500}, {"itl_ms": 30}, ServiceLevel(500.0, None)),
        ({"ttft_ms": 500, "itl_ms": 40}, None, ServiceLevel(500.0, 40.0)),
        ({}, None, None),
    ],
)
async def test_service_level_of_a_key_replaces_that_of_a_request(
    own: dict[str, float], asked: dict[str, float] | None, got: ServiceLevel | None
) -> None:
    router = say(REPLY)
    async with serving(router, config=config_with(key_entry(slo=own))) as service:
        assert (await ask(service, body={**TEXT, "slo": asked}))[0] == 200
    assert router.requests[0].level == got


@pytest.mark.parametrize(
    ("client", "headers", "is_let_in"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("10.0.0.7", {}, False),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, False),
        ("127.0.0.1", {"Forwarded": "for=10.0.0.7"}, False),
        ("127.0.0.1", {"Origin": "http://elsewhere.example"}, False),
    ],
)
async def test_without_keys_only_programs_of_this_machine_manage(
    client: str, headers: dict[str, str], is_let_in: bool
) -> None:
    assert (await manage(Keyring(config_with().auth), client, headers) == 200) is is_let_in


async def test_with_keys_those_manage_that_may_wherever_they_are() -> None:
    keys = (key_entry(), key_entry(OTHER_KEY, "operator", can_manage=True))
    keyring = Keyring(config_with(*keys).auth)
    assert await manage(keyring, "127.0.0.1", {"Authorization": f"Bearer {KEY}"}) == 403
    assert await manage(keyring, "10.0.0.7", {"Authorization": f"Bearer {OTHER_KEY}"}) == 200
    assert await manage(keyring, "127.0.0.1", {}) == 401


async def manage(keyring: Keyring, client: str, headers: dict[str, str]) -> int:
    """Status of a call that changes what is served, from the address ``client``."""

    async def answer(request: Request) -> Response:
        try:
            check_manager(request)
        except NotAllowedError:
            return Response(status_code=403)
        return Response()

    app = KeyMiddleware(Starlette(routes=[Route("/load", answer)]), keyring)
    observed = ObserveMiddleware(app, CallObserver(config_with().logging))
    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await observed(
        {
            "type": "http",
            "method": "GET",
            "path": "/load",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": (client, 1),
        },
        receive,
        send,
    )
    return statuses[0]
