"""Tests of the public gRPC service over a scripted router: the same checks as HTTP, through a real server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.config import parse_config
from specray.errors import (
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from specray.fakes import FakeRouterClient
from specray.interfaces import RouterClient
from specray.requests import FinishReason, TextOptions
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import GenerateParams
from specray.serving.grpc.handler import GrpcIngress, served
from specray.serving.readiness import check_ready
from specray.types import Grammar, GrammarKind
from tests.unit.serving.http.service import INFO, MODEL, REPLY, TOKENIZER, endless, say, wait_until
from tests.unit.tokenization.tiny_tokenizer import EOS


def server_of(router: RouterClient) -> InferenceServer:
    config = parse_config({"served_model_name": MODEL})
    return InferenceServer(GrpcIngress(client=router, tokenizer=TOKENIZER, config=config), "127.0.0.1:0")


@asynccontextmanager
async def connected(router: RouterClient) -> AsyncIterator[SpecrayClient]:
    server = server_of(router)
    await server.start()
    try:
        async with SpecrayClient(server.address) as client:
            yield client
    finally:
        await server.stop(grace_s=0)


async def test_prediction_reaches_the_router_as_tokens() -> None:
    router = say(REPLY)
    async with connected(router) as client:
        params = GenerateParams(text="def", prediction="hello a", max_tokens=3)
        async for _ in client.generate(params):
            pass
    assert router.requests[0].speculation.prediction == TOKENIZER.encode("hello a")


async def test_generate_streams_text_and_ends_with_usage() -> None:
    async with connected(say(REPLY, then=(EOS,))) as client:
        events = [event async for event in client.generate(GenerateParams(text="def", max_tokens=50))]
    assert "".join(event.text for event in events) == REPLY
    assert [event.finish_reason for event in events][-2:] == [None, FinishReason.STOP]
    usage, stats = events[-1].usage, events[-1].speculation
    assert usage is not None and stats is not None
    num_reply = len(TOKENIZER.encode(REPLY))
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (1, num_reply + 1)
    assert usage.num_cached_tokens == 0
    assert stats.num_draft_tokens == 8
    assert sum((event.token_ids for event in events), ()) == (*TOKENIZER.encode(REPLY), EOS)


@pytest.mark.parametrize(
    ("params", "field", "part"),
    [
        ({"text": ""}, "text", "empty"),
        ({"token_ids": ()}, "tokens", "empty"),
        ({"token_ids": (264,)}, "tokens", "264; allowed: 0..263"),
        ({"text": "x" * 64}, "text", "64; allowed: 1..63"),
        ({"text": "a", "max_tokens": 0}, "max_tokens", "0; allowed: 1..2147483647"),
        ({"text": "a", "bad_words": ("",)}, "bad_words", "0; allowed: 1..256"),
        ({"text": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2; allowed: -1 or 1..63"),
        (
            {"text": "a", "grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}')},
            "grammar",
            "uniqueItems",
        ),
        ({"text": "a", "temperature": float("nan")}, "temperature", "nan; allowed: 0..2"),
        ({"text": "a", "top_p": -1.0}, "top_p", "-1.0"),
        ({"text": "a", "logprobs": 21}, "logprobs", "21; allowed: 0..20"),
        ({"text": "a", "stop": ("",)}, "stop", "0; allowed: 1..256"),
        ({"text": "a", "logit_bias": ((5, 200.0),)}, "logit_bias", "200.0; allowed: -100..100"),
        (
            {"text": "a", "num_speculative_tokens": 33},
            "speculation.num_speculative_tokens",
            "33; allowed: 0..32",
        ),
        ({"text": "a", "tenant": "x" * 65}, "speculation.tenant", "65; allowed: 0..64"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_input_is_invalid_argument_naming_the_field(
    params: dict[str, Any], field: str, part: str
) -> None:
    router = FakeRouterClient(info=INFO)
    async with connected(router) as client:
        with pytest.raises(InvalidRequestError, match=part) as caught:
            await anext(client.generate(GenerateParams(**params)))
    assert caught.value.field == field
    assert router.requests == []


async def test_unknown_model_is_not_found() -> None:
    async with connected(FakeRouterClient(info=INFO)) as client:
        with pytest.raises(ModelNotFoundError, match="allowed: 'tiny'"):
            await anext(client.generate(GenerateParams(text="a", model="gpt-9")))


async def test_overload_says_when_to_come_back() -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("full", retry_after_s=7)])
    async with connected(router) as client:
        with pytest.raises(OverloadedError) as caught:
            await anext(client.generate(GenerateParams(text="a")))
    assert caught.value.retry_after_s == 7


async def test_priority_and_the_calls_deadline_reach_the_router() -> None:
    router = say(REPLY)
    async with connected(router) as client:
        params = GenerateParams(text="a", priority=-7)
        _ = [event async for event in client.generate(params, timeout_s=30)]
    (request,) = router.requests
    assert request.priority == -7
    assert request.timeout_s is not None and 29 < request.timeout_s < 31


@pytest.mark.slow
async def test_caller_that_cancels_aborts_the_request() -> None:
    router = endless()
    async with connected(router) as client:
        with pytest.raises(DeadlineExceededError):
            await anext(client.generate(GenerateParams(text="a"), timeout_s=0.3))
        await wait_until(lambda: len(router.aborted_request_ids) == 1)


async def test_info_names_the_draft_of_now_after_another_was_named() -> None:
    router = say(REPLY, then=(EOS,))
    async with connected(router) as client:
        assert [event async for event in client.generate(GenerateParams(text="a", max_tokens=2))]
        assert (await client.info()).draft_model == "draft"
        router.info = dataclasses.replace(INFO, draft_model="other")
        assert (await client.info()).draft_model == "other"


async def test_info_names_the_served_model() -> None:
    async with connected(FakeRouterClient(info=INFO)) as client:
        info = await client.info()
    assert (info.model, info.draft_model, info.vocab_size, info.max_model_len) == (MODEL, "draft", 264, 64)


class FailingRouter(FakeRouterClient):
    """A router whose readiness ends as a test sets it."""

    failure: Exception | None = None
    num_asked = 0

    async def check_ready(self) -> None:
        self.num_asked += 1
        await super().check_ready()
        if self.failure is not None:
            raise self.failure


async def test_health_says_what_ready_says_from_the_first_word_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.readiness.FRESH_S", 0.0)
    monkeypatch.setattr("specray.rpc.health.LOOK_PERIOD_S", 0.001)
    router = FailingRouter(info=INFO, is_ready=False)
    server = server_of(router)
    async with served(server, router, grace_s=0), aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        seen = [(await watch.read()).status]
        router.is_ready = True
        seen.append((await watch.read()).status)
        # What nobody expects does not end the watch.
        router.failure = RuntimeError("a bug")
        seen.append((await watch.read()).status)
        router.failure = None
        seen.append((await watch.read()).status)
        router.is_ready = False
        seen.append((await watch.read()).status)
    is_serving = [status == health_pb2.HealthCheckResponse.SERVING for status in seen]
    assert is_serving == [False, True, False, True, False]


async def test_nobody_is_asked_for_the_health_that_nobody_wants_to_know() -> None:
    router = FailingRouter(info=INFO)
    server = server_of(router)
    async with served(server, router, grace_s=0), aio.insecure_channel(server.address) as channel:
        await asyncio.sleep(0.05)
        assert router.num_asked == 0
        health = health_pb2_grpc.HealthStub(channel)
        checks = [health.Check(health_pb2.HealthCheckRequest(), timeout=20) for _ in range(5)]
        seen = {check.status for check in await asyncio.gather(*checks)}
        assert seen == {health_pb2.HealthCheckResponse.SERVING}
        # All five have the same answer.
        assert router.num_asked == 1


class Ending(InferenceServer):
    """A server that records the grace that it is given."""

    grace_s: float | None = None

    async def stop(self, grace_s: float = 5.0) -> None:
        self.grace_s = grace_s
        await super().stop(grace_s)


class Gate:
    """A clock whose waits end when a test says so."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await self.opened.wait()


async def _text(client: SpecrayClient) -> str:
    params = GenerateParams(text="def", max_tokens=50)
    return "".join([event.text async for event in client.generate(params, timeout_s=20)])


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_calls_under_way_have_their_grace_at_the_end(is_in_time: bool) -> None:
    gate = Gate()
    router = FakeRouterClient(
        info=INFO, reply=lambda _: (*TOKENIZER.encode(REPLY), EOS), clock=gate, chunk_interval_s=1
    )
    config = parse_config({"served_model_name": MODEL})
    server = Ending(GrpcIngress(client=router, tokenizer=TOKENIZER, config=config), "127.0.0.1:0")
    grace_s = 20 if is_in_time else 0.05
    block = AsyncExitStack()
    await block.enter_async_context(served(server, router, grace_s=grace_s))
    async with SpecrayClient(server.address) as client:
        call = asyncio.create_task(_text(client))
        await wait_until(lambda: bool(router.requests))
        end = asyncio.create_task(block.aclose())
        await asyncio.sleep(0.02)
        assert not end.done()
        if is_in_time:
            gate.opened.set()
            assert await call == REPLY
        else:
            with pytest.raises(EngineLostError):
                await call
        await end
    assert server.grace_s == grace_s
    assert bool(router.aborted_request_ids) != is_in_time


async def test_router_that_says_nothing_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeRouterClient):
        async def check_ready(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("specray.serving.readiness.READY_TIMEOUT_S", 0.01)
    with pytest.raises(EngineLostError, match=r"^no step of the target within 0\.01 s$"):
        await check_ready(Silent(info=INFO))


async def test_generate_passes_on_what_forbids_tokens_and_how_text_is_written() -> None:
    router = FakeRouterClient(info=INFO)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    async with connected(router) as client:
        for params in (
            GenerateParams(text="a", grammar=grammar),
            GenerateParams(
                token_ids=(5, 6, 7),
                allowed_token_ids=(5, 9),
                bad_words=("a",),
                truncate_prompt_tokens=2,
                cache_salt="pepper",
                skip_special_tokens=False,
                include_stop_str_in_output=True,
            ),
        ):
            assert [event async for event in client.generate(params)]
    first, second = router.requests
    assert first.sampling.grammar == grammar
    assert first.text == TextOptions()
    assert second.prompt_token_ids == (6, 7)
    assert second.sampling.allowed_token_ids == (5, 9)
    assert TOKENIZER.encode("a") in second.sampling.bad_words
    assert second.sampling.cache_salt == "pepper"
    assert second.text == TextOptions(skip_special_tokens=False, include_stop=True)
