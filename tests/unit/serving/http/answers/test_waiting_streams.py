"""Streams that wait for their first token: headers, comments, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.errors import EngineLostError
from specray.fakes import FakeRouterClient
from specray.requests import FinishReason, GenerateRequest, OutputChunk
from tests.unit.serving.http.service import INFO, MODEL, TEXT, TOKENIZER, serving, wait_until

BODY = {**TEXT, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}


class Slow(FakeRouterClient):
    """A router whose streams begin, or fail, when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(info=INFO)
        self.may_go_on = asyncio.Event()
        self.is_closed = False
        self._error = error

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        self.requests.append(request)
        try:
            await self.may_go_on.wait()
            if self._error is not None:
                raise self._error
            yield OutputChunk(request.request_id, TOKENIZER.encode("a"), finish_reason=FinishReason.LENGTH)
        finally:
            self.is_closed = True


def config(**http: Any) -> Config:
    return parse_config({"served_model_name": MODEL, "http": {"first_token_grace_s": 0.02, **http}})


async def test_headers_leave_before_the_first_token() -> None:
    router = Slow()
    async with (
        serving(router, config=config()) as service,
        service.http.post("/v1/completions", json=BODY) as response,
    ):
        assert (response.status, router.is_closed) == (200, False)
        router.may_go_on.set()
        lines = (await response.read()).decode().split("\n\n")
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == "a"
    assert lines[1:] == ["data: [DONE]", ""]


async def test_role_of_a_chat_comes_before_the_first_token() -> None:
    router = Slow()
    async with (
        serving(router, config=config()) as service,
        service.http.post("/v1/chat/completions", json=CHAT) as response,
    ):
        event = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert event["choices"][0]["delta"]["role"] == "assistant"
        assert not router.is_closed


async def test_error_within_the_grace_has_its_status_and_a_later_one_is_an_event() -> None:
    error = EngineLostError("the target was lost")
    router = Slow(error)
    router.may_go_on.set()
    async with serving(router, config=config(first_token_grace_s=10)) as service:
        status, answer = await service.post("/v1/completions", BODY)
    assert (status, answer["error"]["message"]) == (503, "the target was lost")
    late = Slow(error)
    async with (
        serving(late, config=config()) as service,
        service.http.post("/v1/completions", json=BODY) as response,
    ):
        assert response.status == 200
        late.may_go_on.set()
        first, *rest = (await response.read()).decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"] == answer["error"]
    assert rest == ["data: [DONE]", ""]


async def test_comments_keep_a_silent_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specray.serving.http.events.EventStreamResponse.__init__.__kwdefaults__", {"keep_alive_s": 0.02}
    )
    router = Slow()
    async with (
        serving(router, config=config()) as service,
        service.http.post("/v1/completions", json=BODY) as response,
    ):
        for _ in range(3):
            assert await response.content.readline() == b": waiting\n"
            assert await response.content.readline() == b"\n"
        router.may_go_on.set()
        rest = (await response.read()).decode()
    events = [part for part in rest.split("\n\n") if part and part != ": waiting"]
    assert len(events) == 2
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("grace_s", [0.02, 10.0], ids=["after the headers", "before"])
async def test_client_that_leaves_while_it_waits_ends_the_request(grace_s: float) -> None:
    router = Slow()
    async with serving(router, config=config(first_token_grace_s=grace_s)) as service:
        call = asyncio.create_task(service.http.post("/v1/completions", json=BODY).__aenter__())
        await wait_until(lambda: len(router.requests) == 1)
        if grace_s < 1:
            (await call).close()
        else:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await wait_until(lambda: router.is_closed)
