"""Requests that end without their answer: the router gives up or is silent, the client leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from specray.config import parse_config
from specray.errors import EngineLostError
from specray.fakes import FakeRouterClient
from specray.requests import FinishReason, GenerateRequest, OutputChunk
from tests.unit.serving.http.service import INFO, MODEL, TOKENIZER, RealClock, endless, serving, wait_until


class Aborting(FakeRouterClient):
    """A router that gives every request up."""

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        return OutputChunk(request.request_id, (5,), finish_reason=FinishReason.ABORT)


async def test_request_that_the_router_gives_up_is_no_success() -> None:
    async with serving(Aborting(info=INFO)) as service:
        status, answer = await service.post("/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (503, "the request was aborted; it may be sent again")


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_aborts_every_choice(is_stream: bool) -> None:
    router = endless()
    body = {"prompt": ["a", "b"], "stream": is_stream}
    async with serving(router) as service:
        with pytest.raises(TimeoutError):
            timeout = aiohttp.ClientTimeout(total=0.3)
            async with service.http.post("/v1/completions", json=body, timeout=timeout) as response:
                await response.read()  # Of a stream, the headers come at once.
        await wait_until(lambda: len(router.aborted_request_ids) == 2)
    assert sorted(router.aborted_request_ids) == sorted(request.request_id for request in router.requests)


class FailingFirst(FakeRouterClient):
    """A router whose first request fails once the second waits for ever."""

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        if request.request_id.endswith("-0"):
            await wait_until(lambda: len(self.requests) == 1)
            raise EngineLostError("the target was lost")
        return await super().complete(request)


async def test_failure_of_one_choice_aborts_the_others() -> None:
    router = FailingFirst(info=INFO, clock=RealClock(), chunk_interval_s=1000.0)
    async with serving(router) as service:
        status, _ = await service.post("/v1/completions", {"prompt": "a", "n": 2})
        assert status == 503
        assert len(router.aborted_request_ids) == 1


class Stuck(FakeRouterClient):
    """A router that sends one chunk, then nothing; records when the stream is closed."""

    def __init__(self) -> None:
        super().__init__(info=INFO)
        self.is_closed = asyncio.Event()

    async def stream(self, request: GenerateRequest) -> Any:
        try:
            yield OutputChunk(request.request_id, TOKENIZER.encode("a"))
            await asyncio.sleep(1000)
        finally:
            self.is_closed.set()


async def test_client_that_leaves_in_the_middle_of_a_stream_closes_it() -> None:
    router = Stuck()
    async with serving(router) as service:
        async with service.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            assert not router.is_closed.is_set()
        async with asyncio.timeout(10):
            await router.is_closed.wait()


async def test_silent_router_ends_in_503_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.calls.prepare.DEADLINE_MARGIN_S", 0.0)
    config = parse_config(
        {
            "served_model_name": MODEL,
            "router": {"request_timeout_s": 0.3},
            "http": {"first_token_grace_s": 10},
        }
    )
    router = endless()
    async with serving(router, config=config) as service:
        for is_stream in (False, True):
            async with service.http.post(
                "/v1/completions", json={"prompt": "a", "stream": is_stream}
            ) as response:
                assert response.status == 503
                assert "no answer within 0." in (await response.json())["error"]["message"]
    assert len(router.aborted_request_ids) == 2
