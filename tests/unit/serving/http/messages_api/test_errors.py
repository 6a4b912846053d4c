"""Keys and errors below /v1/messages: Anthropic's header, its form and its statuses, wherever they arise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.errors import DeadlineExceededError, EngineLostError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import FinishReason, GenerateRequest, OutputChunk
from specray.serving.admission.api_keys import key_hash
from specray.serving.observe import CallObserver
from tests.unit.serving.http.service import (
    INFO,
    MODEL,
    TOKENIZER,
    endless,
    say,
    serving,
    typed_events_of,
    wait_until,
)

PATH = "/v1/messages"
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
KEY = "sk-specray-" + "aB3_" * 10 + "xyz"
OTHER = "sk-specray-" + "Zq7-" * 10 + "uvw"


def config(**more: Any) -> Config:
    keys = [{"name": "team-a", "sha256": key_hash(KEY)}]
    return parse_config({"served_model_name": MODEL, "auth": {"keys": keys}, **more})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"X-Api-Key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}, 200),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"Bearer {KEY}", "x-api-key": OTHER}, 200),
        ({"Authorization": f"Bearer {OTHER}", "x-api-key": KEY}, 401),
        ({"x-api-key": OTHER}, 401),
        ({"x-api-key": f"Bearer {KEY}"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
async def test_key_comes_by_either_header(headers: dict[str, str], status: int) -> None:
    router = say("a")
    async with serving(router, config=config()) as service:
        for path in (PATH, f"{PATH}/count_tokens", "/v1/chat/completions"):
            body = {
                name: value for name, value in BODY.items() if "count" not in path or name != "max_tokens"
            }
            async with service.http.post(path, json=body, headers=headers) as response:
                answer = await response.json()
                assert response.status == status
            if status == 401 and path.startswith(PATH):
                assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")
                assert set(answer) == {"type", "error", "request_id"}
            elif status == 401:
                assert answer["error"]["code"] == "invalid_api_key"
    assert (router.requests == []) is (status == 401)


async def test_calls_run_under_the_tenant_of_their_key() -> None:
    router = say("a")
    headers = {"x-api-key": KEY}
    async with serving(router, config=config()) as service:
        for path, body in ((PATH, BODY), ("/v1/responses", {"input": "a"})):
            async with service.http.post(path, json=body, headers=headers) as response:
                assert response.status == 200
    assert [request.speculation.tenant for request in router.requests] == ["team-a", "team-a"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("full", 2.5), 429, "rate_limit_error"),
        (EngineLostError("the target was lost"), 529, "overloaded_error"),
        (DeadlineExceededError("too late"), 504, "timeout_error"),
        (RuntimeError("a secret"), 500, "api_error"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_errors_before_the_first_token_have_anthropics_statuses(
    error: Exception, status: int, kind: str, is_stream: bool
) -> None:
    router = FakeRouterClient(info=INFO, errors=[error])
    async with (
        serving(router) as service,
        service.http.post(PATH, json={**BODY, "stream": is_stream}) as response,
    ):
        assert response.status == status
        answer = await response.json()
        assert ("Retry-After" in response.headers) == (status in (429, 529))
        assert response.headers["X-Request-Id"] == answer["request_id"]
    told = "internal error; the server's log has the details" if status == 500 else str(error)
    assert answer["error"] == {"type": kind, "message": told}


class Breaking(FakeRouterClient):
    """A router whose stream breaks after its first token."""

    async def stream(self, request: GenerateRequest) -> Any:
        yield OutputChunk(request.request_id, TOKENIZER.encode("a"))
        raise OverloadedError("full")


async def test_later_errors_are_the_streams_last_event() -> None:
    async with serving(Breaking(info=INFO)) as service:
        events = await typed_events_of(service, PATH, BODY)
    kinds = [event["type"] for event in events]
    assert kinds == ["message_start", "ping", "content_block_start", "content_block_delta", "error"]
    assert events[-1]["error"] == {"type": "rate_limit_error", "message": "full"}


async def test_other_problems_of_http_have_anthropics_form_too() -> None:
    small = parse_config({"served_model_name": MODEL, "http": {"max_body_bytes": 1024}})
    cases = [
        ("GET", PATH, {}, 405, "invalid_request_error"),
        (
            "POST",
            PATH,
            {"data": "{", "headers": {"Content-Type": "application/json"}},
            400,
            "invalid_request_error",
        ),
        (
            "POST",
            PATH,
            {"data": "{}", "headers": {"Content-Type": "text/plain"}},
            415,
            "invalid_request_error",
        ),
        ("POST", PATH, {"json": {**BODY, "system": "x" * 2000}}, 413, "request_too_large"),
        ("POST", PATH, {"json": {**BODY, "model": "other"}}, 404, "not_found_error"),
        ("POST", f"{PATH}/batches", {"json": {}}, 400, "invalid_request_error"),
        ("GET", f"{PATH}/batches/1/results", {}, 400, "invalid_request_error"),
        ("POST", f"{PATH}/unknown", {"json": {}}, 404, "not_found_error"),
    ]
    async with serving(say("a"), config=small) as service:
        for method, path, more, status, kind in cases:
            async with service.http.request(method, path, **more) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["type"]) == (status, kind), (method, path, answer)


async def test_pings_keep_a_silent_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specray.serving.http.events.EventStreamResponse.__init__.__kwdefaults__", {"keep_alive_s": 0.02}
    )
    grace = parse_config({"served_model_name": MODEL, "http": {"first_token_grace_s": 0.02}})
    router = Waiting(info=INFO)
    async with serving(router, config=grace) as service:
        events = await typed_events_of(service, PATH, BODY)
    kinds = [event["type"] for event in events]
    first = kinds.index("content_block_start")
    assert kinds[:first] == ["message_start", *["ping"] * (first - 1)]
    assert first >= 4


class Waiting(FakeRouterClient):
    """A router whose first token takes some pings."""

    async def stream(self, request: GenerateRequest) -> Any:
        await asyncio.sleep(0.3)
        yield OutputChunk(request.request_id, TOKENIZER.encode("a"), finish_reason=FinishReason.LENGTH)


async def test_calls_are_counted_and_measured_as_those_of_chats() -> None:
    observer = CallObserver(parse_config({}).logging)
    paths = {
        PATH: BODY,
        "/v1/responses": {"input": "a"},
        f"{PATH}/count_tokens": {"messages": BODY["messages"]},
    }
    async with serving(say("a"), observer=observer) as service:
        for path, body in paths.items():
            assert (await service.post(path, body))[0] == 200
            if "count" not in path:
                await typed_events_of(service, path, body)
    for path, num_calls, num_streams in (
        (PATH, 2, 1),
        ("/v1/responses", 2, 1),
        (f"{PATH}/count_tokens", 1, 0),
    ):
        labels = [("protocol", "http"), ("name", f"POST {path}")]
        calls = observer.metrics.value("specray_ingress_calls_total", [*labels, ("code", "200")])
        first = observer.metrics.value("specray_ingress_time_to_first_token_seconds_count", labels)
        assert (calls, first) == (num_calls, num_streams), path


@pytest.mark.parametrize(
    ("path", "kind"), [(PATH, "rate_limit_error"), ("/v1/responses", "rate_limit_error")]
)
async def test_full_service_refuses_before_anything_of_the_body_is_checked(path: str, kind: str) -> None:
    router = endless()
    full = {"target": {"max_num_seqs": 1}, "router": {"max_queued_requests": 1}}
    async with serving(router, config=parse_config({"served_model_name": MODEL, **full})) as service:
        running = [asyncio.create_task(service.post(PATH, BODY)) for _ in range(2)]
        await wait_until(lambda: len(router.requests) == 2)
        status, answer = await service.post(path, {"tools": 5})
        assert (status, answer["error"]["type"]) == (429, kind)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_ends_its_request(path: str, is_stream: bool) -> None:
    router = endless()
    body = BODY if path == PATH else {"input": "a"}
    async with serving(router) as service:
        call = asyncio.create_task(service.post(path, {**body, "stream": is_stream}))
        await wait_until(lambda: len(router.requests) == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await wait_until(lambda: len(router.aborted_request_ids) == 1)
