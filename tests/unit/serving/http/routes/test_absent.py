"""What is not offered says so, with a reason, in OpenAI's shape, and is no 404."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from specray.fakes import FakeRouterClient
from specray.serving.http.routes.absent import NOT_OFFERED
from tests.unit.serving.http.service import INFO, serving


async def test_every_path_and_what_is_below_gives_its_reason() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for path, reason in NOT_OFFERED:
            for below in ("", "/", "/abc/content"):
                status, answer = await service.post(path + below, {})
                is_anthropic = path.startswith("/v1/messages")
                error = answer["error"]
                code = ("type", "invalid_request_error") if is_anthropic else ("code", "not_offered")
                assert (status, error[code[0]]) == (400, code[1]), path
                assert answer["error"]["message"] == f"POST {path} is not offered here: {reason}"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_other_methods_too(method: str) -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.request(method, "/v1/files/file-1") as response,
    ):
        assert response.status == 400
        assert ("Connection" in response.headers) == (method != "GET")


async def test_body_that_is_still_coming_is_not_waited_for() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.post("/v1/files", data=endless()) as response,
    ):
        assert response.status == 400


async def test_path_that_nobody_knows_is_not_found() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for path in ("/v1/embeddingsx", "/v1/nothing", "/nothing"):
            assert (await service.post(path, {}))[0] == 404
