"""Tests of API keys over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specray.config import Config
from specray.errors import OverloadedError, UnauthenticatedError
from specray.fakes import FakeRouterClient
from specray.interfaces import RouterClient
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import GenerateParams
from specray.serving.admission.api_keys import Keyring, key_hash
from specray.serving.grpc.handler import GrpcIngress
from tests.unit.serving.http.key_entries import KEY, OTHER_KEY, config_with, key_entry
from tests.unit.serving.http.service import (
    INFO,
    MODEL,
    TOKENIZER,
    endless,
    wait_until,
)

PROMPT = "TheSecretPromptOfAUser"


@asynccontextmanager
async def connected(
    router: RouterClient, config: Config, key: str | None = KEY
) -> AsyncIterator[SpecrayClient]:
    handler = GrpcIngress(client=router, tokenizer=TOKENIZER, config=config)
    server = InferenceServer(handler, "127.0.0.1:0", admit=handler.admitter(Keyring(config.auth)))
    await server.start()
    try:
        async with SpecrayClient(server.address, key=key) as client:
            yield client
    finally:
        await server.stop(grace_s=0)


@pytest.mark.parametrize("key", [None, OTHER_KEY, key_hash(KEY)])
async def test_grpc_without_the_key_is_unauthenticated_and_sees_nothing(key: str | None) -> None:
    router = FakeRouterClient(info=INFO)
    async with connected(router, config_with(key_entry()), key) as client:
        with pytest.raises(UnauthenticatedError):
            await anext(client.generate(GenerateParams(text="")))
        with pytest.raises(UnauthenticatedError):
            await client.info()
    assert router.requests == []


async def test_grpc_with_the_key_runs_under_its_tenant_and_limits() -> None:
    router = endless()
    async with connected(router, config_with(key_entry(max_requests=1))) as client:
        assert (await client.info()).model == MODEL
        events = client.generate(GenerateParams(text="a", tenant="other"))
        first = asyncio.ensure_future(anext(events))
        await wait_until(lambda: len(router.requests) == 1)
        with pytest.raises(OverloadedError, match="1 requests in hand; allowed: 1"):
            await anext(client.generate(GenerateParams(text="a")))
        first.cancel()
        await wait_until(lambda: len(router.aborted_request_ids) == 1)
    assert router.requests[0].speculation.tenant == "team-a"


async def test_grpc_prompts_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    router = FakeRouterClient(info=INFO, errors=[RuntimeError("a bug")])
    async with connected(router, config_with(key_entry())) as client:
        with pytest.raises(Exception, match="internal error"):
            await anext(client.generate(GenerateParams(text=PROMPT, max_tokens=2)))
        async for _ in client.generate(GenerateParams(text=PROMPT, max_tokens=2)):
            pass
    assert "a bug" in caplog.text
    assert PROMPT not in caplog.text and KEY not in caplog.text
