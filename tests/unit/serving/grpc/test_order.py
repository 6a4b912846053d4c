"""The order of every gRPC call: the same places, quotas and deadlines as over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from specray.config import Config, parse_config
from specray.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from specray.interfaces import RouterClient
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import GenerateParams
from specray.serving.admission.api_keys import Keyring, key_hash
from specray.serving.admission.capacity import Admission
from specray.serving.calls.prompts import encode_prompts
from specray.serving.grpc.handler import GrpcIngress
from tests.unit.serving.http.service import (
    MODEL,
    REPLY,
    TEXT,
    TOKENIZER,
    endless,
    say,
    serving,
    wait_until,
)

A, B = "key-a", "key-b"
GENERATE = "/specray.v1.InferenceService/Generate"


def config_with(keys: dict[str, dict[str, Any]], **sections: Any) -> Config:
    entries = [{"name": name, "sha256": key_hash(name), **limits} for name, limits in keys.items()]
    return parse_config({"served_model_name": MODEL, "auth": {"keys": entries}, **sections})


@asynccontextmanager
async def running(router: RouterClient | Admission, config: Config) -> AsyncIterator[str]:
    """Serves over gRPC, and yields the address."""
    handler = GrpcIngress(client=router, tokenizer=TOKENIZER, config=config)
    server = InferenceServer(handler, "127.0.0.1:0", admit=handler.admitter(Keyring(config.auth)))
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def ask(address: str, key: str = A, **params: Any) -> int:
    """Number of events of an answer."""
    async with SpecrayClient(address, key=key) as client:
        params = {"text": "a", "max_tokens": 4} | params
        timeout_s = params.pop("timeout_s", 20.0)
        return len([event async for event in client.generate(GenerateParams(**params), timeout_s=timeout_s)])


def begun(channel: aio.Channel, key: str = A) -> Any:
    """A call whose message does not come."""
    call = channel.stream_stream(GENERATE, None, None)
    return call(metadata=(("authorization", f"Bearer {key}"),))


async def test_messages_of_one_key_that_never_come_hold_no_place_of_others() -> None:
    config = config_with({A: {}, B: {}}, ingress={"max_ongoing_requests": 2})
    async with running(say(REPLY), config) as address, aio.insecure_channel(address) as channel:
        slow = [begun(channel) for _ in range(4)]
        # They reach the server in any order.
        await wait_until(lambda: sum(call.done() for call in slow) == 2)
        assert await ask(address, B)
        assert await ask(address, A)
        ended = [call for call in slow if call.done()]
        assert {await call.code() for call in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(ended) == 3, "one more than before gave its room, to the key with least"


async def test_second_call_of_a_key_is_refused_before_its_message_comes() -> None:
    config = config_with({A: {"max_requests": 1}, B: {}})
    async with running(say(REPLY), config) as address, aio.insecure_channel(address) as channel:
        calls = [begun(channel) for _ in range(2)]
        await wait_until(lambda: sum(call.done() for call in calls) == 1)
        (refused,) = [call for call in calls if call.done()]
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests in hand; allowed: 1" in await refused.details()
        assert await ask(address, B)


async def test_calls_over_http_and_grpc_are_bounded_together() -> None:
    config = parse_config({"served_model_name": MODEL, "ingress": {"max_ongoing_requests": 2}})
    router = endless()
    client = Admission.of(router, config)
    async with serving(client, config=config) as service, running(client, config) as address:
        tasks = [
            asyncio.create_task(service.post("/v1/completions", TEXT)),
            asyncio.create_task(ask(address)),
        ]
        await wait_until(lambda: len(router.requests) == 2)
        with pytest.raises(OverloadedError, match="2 calls are in hand; allowed: 2"):
            await ask(address)
        assert (await service.post("/v1/completions", TEXT))[0] == 429
        for task in tasks:
            task.cancel()
        await wait_until(lambda: client.places.num_calls == 0)


async def test_router_has_what_is_left_of_a_calls_time() -> None:
    router = say(REPLY)
    async with running(router, config_with({A: {}})) as address:
        await ask(address, timeout_s=60.0)
    timeout_s = router.requests[0].timeout_s
    assert timeout_s is not None and 0.0 < timeout_s < 60.0


async def test_time_that_is_over_is_over_before_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*values: Any) -> list[tuple[int, ...]]:
        time.sleep(0.05)
        return encode_prompts(*values)

    monkeypatch.setattr("specray.serving.calls.prepare.encode_prompts", slow)
    router = say(REPLY)
    async with running(router, config_with({A: {}})) as address:
        with pytest.raises(DeadlineExceededError):
            await ask(address, timeout_s=1e-4)
    assert router.requests == []


@pytest.mark.parametrize("params", [{"text": "a" * 5000}, {"text": None, "token_ids": (5,) * 5000}])
async def test_prompt_that_the_context_cannot_hold_is_not_tokenized(params: dict[str, Any]) -> None:
    router = say(REPLY)
    async with running(router, config_with({A: {}})) as address:
        with pytest.raises(InvalidRequestError, match=r"least number of tokens in .* is "):
            await ask(address, **params)
    assert router.requests == []


async def test_quota_is_asked_before_a_prompt_is_tokenized() -> None:
    router = endless()
    async with running(router, config_with({A: {"max_queued_tokens": 20}})) as address:
        first = asyncio.create_task(ask(address, text="a" * 19))
        await wait_until(lambda: len(router.requests) == 1)
        with pytest.raises(OverloadedError, match="key 'key-a' has 19 prompt tokens waiting; allowed: 20"):
            await ask(address, text="b" * 40)
        first.cancel()
