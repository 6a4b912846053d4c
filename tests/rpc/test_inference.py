"""The public service over a real socket, with a scripted handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    SpecrayError,
)
from specray.requests import FinishReason
from specray.rpc.channel import ChannelOptions
from specray.rpc.event_loop import new_event_loop
from specray.rpc.inference import server as inference
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import GenerateEvent, GenerateParams, TokenUsage
from specray.rpc.pb import inference_pb2, inference_pb2_grpc
from tests.rpc.engines import SERVICE_INFO, ScriptedHandler

DEADLINE_S = 10.0
GENERATE = "/specray.v1.InferenceService/Generate"


@asynccontextmanager
async def serving(handler: ScriptedHandler, address: str, **options: Any) -> AsyncIterator[InferenceServer]:
    server = InferenceServer(handler, address, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.1)


async def send_raw(address: str, data: bytes) -> aio.AioRpcError:
    """Sends raw bytes as a Generate request; returns the error."""
    async with aio.insecure_channel(address) as channel:
        call = channel.unary_stream(GENERATE, None, None)(data, timeout=DEADLINE_S)
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return caught.value


async def test_generate_streams_events_and_the_last_one_tells_why(address: str) -> None:
    handler = ScriptedHandler()
    async with serving(handler, address), SpecrayClient(address) as client:
        params = GenerateParams(token_ids=(7, 8), max_tokens=5, temperature=0.0, seed=0, stop=("x",))
        events = [event async for event in client.generate(params, timeout_s=DEADLINE_S)]
    assert events == [
        GenerateEvent("r-1", text="<7>", token_ids=(7,)),
        GenerateEvent("r-1", text="<8>", token_ids=(8,)),
        GenerateEvent("r-1", finish_reason=FinishReason.STOP, usage=TokenUsage(2, 2, 1)),
    ]
    (seen,) = handler.seen
    # The call's deadline; gRPC rounds it up by a little.
    assert seen.timeout_s is not None and DEADLINE_S - 1 < seen.timeout_s < DEADLINE_S + 1
    assert replace(seen, timeout_s=None) == params


async def test_the_generated_stub_of_another_client_works(address: str) -> None:
    async with serving(ScriptedHandler(), address), aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        messages: list[Message] = [
            message
            async for message in stub.Generate(inference_pb2.GenerateRequest(text="ab"), timeout=DEADLINE_S)
        ]
        info = await stub.Info(inference_pb2.InfoRequest(), timeout=DEADLINE_S)
    assert [message.text for message in messages] == ["<0>", "<1>", ""]  # type: ignore[attr-defined]
    assert (info.model, info.draft_model, info.max_model_len) == ("tiny", "tiny-draft", 128)


@dataclass
class Case:
    failure: Exception
    code: grpc.StatusCode
    details: str
    metadata: dict[str, str]


CASES = [
    Case(
        InvalidRequestError("top_p is 2; allowed: (0, 1]", field="top_p"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "top_p is 2; allowed: (0, 1]",
        {"field": "top_p"},
    ),
    Case(
        ModelNotFoundError("model 'x' is not served", field="model"),
        grpc.StatusCode.NOT_FOUND,
        "model 'x' is not served",
        {"field": "model"},
    ),
    Case(
        OverloadedError("256 requests wait", retry_after_s=2.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "256 requests wait",
        {"retry-after": "3"},
    ),
    Case(
        DeadlineExceededError("the time of 1 s ended before its first token"),
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the time of 1 s ended before its first token",
        {},
    ),
    Case(EngineLostError("the target was lost"), grpc.StatusCode.UNAVAILABLE, "the target was lost", {}),
    Case(ConfigError("/secret/path"), grpc.StatusCode.INTERNAL, "internal error", {}),
    Case(RuntimeError("secret stack"), grpc.StatusCode.INTERNAL, "internal error", {}),
    Case(TimeoutError(), grpc.StatusCode.INTERNAL, "internal error", {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case.failure).__name__)
async def test_errors_of_the_handler_become_statuses(case: Case, address: str) -> None:
    async with serving(ScriptedHandler(failure=case.failure), address):
        error = await send_raw(address, inference_pb2.GenerateRequest(text="a").SerializeToString())
        assert (error.code(), error.details()) == (case.code, case.details)
        assert dict(error.trailing_metadata() or ()) == case.metadata
        async with SpecrayClient(address) as client:
            with pytest.raises(SpecrayError) as caught:
                await client.info(timeout_s=DEADLINE_S)
            assert case.details in str(caught.value)


@pytest.mark.parametrize("failure", [case.failure for case in CASES[:4]], ids=lambda e: type(e).__name__)
async def test_the_client_raises_what_the_handler_raised(failure: Exception, address: str) -> None:
    async with serving(ScriptedHandler(failure=failure), address), SpecrayClient(address) as client:
        with pytest.raises(type(failure)) as caught:
            async for _ in client.generate(GenerateParams(text="a"), timeout_s=DEADLINE_S):
                pass
    assert type(caught.value) is type(failure)
    assert getattr(caught.value, "field", None) == getattr(failure, "field", None)
    assert getattr(caught.value, "retry_after_s", None) in (None, 3.0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff", "GenerateRequest"),
        (b"\x12\x03ab\xff", "not UTF-8"),
        (b"", "prompt is missing"),
        (b"\x12\xff\xff\xff\xff\x0f", "GenerateRequest"),
    ],
    ids=["garbage", "not-utf8", "no-prompt", "length-beyond-the-end"],
)
async def test_broken_bytes_are_the_callers_mistake(data: bytes, says: str, address: str) -> None:
    handler = ScriptedHandler()
    async with serving(handler, address):
        error = await send_raw(address, data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in (error.details() or "")
    assert handler.seen == []


@pytest.mark.slow
async def test_a_message_over_the_limit_is_refused_by_size(address: str) -> None:
    handler = ScriptedHandler()
    async with serving(handler, address, options=ChannelOptions(max_receive_bytes=10_000)):
        async with SpecrayClient(address) as client:
            with pytest.raises(InvalidRequestError, match="larger than max"):
                async for _ in client.generate(GenerateParams(text="a" * 20_000), timeout_s=DEADLINE_S):
                    pass
        error = await send_raw(address, inference_pb2.GenerateRequest(text="a" * 20_000).SerializeToString())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert handler.seen == []


async def test_a_long_error_text_still_fits_the_status(address: str) -> None:
    async with serving(ScriptedHandler(failure=InvalidRequestError("é" * 100_000)), address):
        error = await send_raw(address, inference_pb2.GenerateRequest(text="a").SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "é" * 1023 + "…"


async def closed(handler: ScriptedHandler) -> bool:
    return await asyncio.to_thread(handler.closed.wait, DEADLINE_S)


@pytest.mark.parametrize("how", ["cancel", "deadline", "vanish"])
async def test_a_client_that_leaves_closes_the_handlers_iterator(how: str, address: str) -> None:
    handler = ScriptedHandler(waits_after=1)
    async with serving(handler, address), SpecrayClient(address) as client:
        timeout_s = 0.2 if how == "deadline" else DEADLINE_S
        events = client.generate(GenerateParams(text="abc"), timeout_s=timeout_s)
        await anext(events)
        if how == "deadline":
            with pytest.raises(DeadlineExceededError):
                await anext(events)
        else:
            assert not handler.closed.is_set()
            await (events.aclose() if how == "cancel" else client.close())
        assert await closed(handler)
        if how == "vanish":
            with pytest.raises((SpecrayError, asyncio.CancelledError)):
                await anext(events)


@dataclass
class EndlessHandler(ScriptedHandler):
    """A handler whose answer never ends."""

    num_produced: int = 0

    async def generate(self, params: GenerateParams) -> AsyncIterator[GenerateEvent]:
        try:
            while True:
                self.num_produced += 1
                yield GenerateEvent("r-1", text="x" * 10_000)
        finally:
            self.closed.set()


@pytest.mark.slow
async def test_a_client_that_does_not_read_holds_the_handler_back(address: str) -> None:
    handler = EndlessHandler()
    async with serving(handler, address), aio.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(text="a").SerializeToString()
        call = channel.unary_stream(GENERATE, None, None)(request, timeout=DEADLINE_S)
        await call.read()
        async with asyncio.timeout(DEADLINE_S):
            before = -1
            while handler.num_produced != before:
                before = handler.num_produced
                await asyncio.sleep(0.3)
        call.cancel()
        assert await closed(handler)


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_given_up_though_its_call_has_no_deadline(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "WRITE_TIMEOUT_S", 0.2)
    handler = EndlessHandler()
    async with (
        serving(handler, address),
        aio.insecure_channel(address) as channel,
        asyncio.timeout(DEADLINE_S),
    ):
        request = inference_pb2.GenerateRequest(text="a").SerializeToString()
        call = channel.unary_stream(GENERATE, None, None)(request)
        await call.read()
        assert await closed(handler)
        with pytest.raises(aio.AioRpcError) as caught:
            while await call.read() is not aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == "the client took nothing for 0.2 s"


async def test_health_follows_readiness_and_stop(address: str) -> None:
    server = InferenceServer(ScriptedHandler(), address)
    await server.start()
    async with aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="specray.v1.InferenceService")
        watch = stub.Watch(request, timeout=DEADLINE_S)
        seen = [(await watch.read()).status]
        await server.set_ready(False)
        seen.append((await watch.read()).status)
        await server.set_ready(True)
        seen.append((await watch.read()).status)
        stopping = asyncio.create_task(server.stop(0.1))
        seen.append((await watch.read()).status)
        await stopping
    assert seen == [
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    ]


async def test_stop_lets_a_request_in_hand_end(address: str) -> None:
    handler = ScriptedHandler()
    go_on = asyncio.Event()

    async def slow(params: GenerateParams) -> AsyncIterator[GenerateEvent]:
        yield GenerateEvent("r-1", text="first")
        await go_on.wait()
        yield GenerateEvent("r-1", text="last", finish_reason=FinishReason.LENGTH)

    handler.generate = slow  # type: ignore[method-assign, assignment]
    server = InferenceServer(handler, address)
    await server.start()
    async with SpecrayClient(address) as client:
        events = client.generate(GenerateParams(text="a"), timeout_s=DEADLINE_S)
        assert (await anext(events)).text == "first"
        stopping = asyncio.create_task(server.stop(DEADLINE_S))
        await asyncio.sleep(0.05)
        go_on.set()
        assert [event.text async for event in events] == ["last"]
        await asyncio.wait_for(stopping, DEADLINE_S)


async def test_a_port_in_use_is_a_config_error() -> None:
    first = InferenceServer(ScriptedHandler(), "127.0.0.1:0")
    address = await first.start()
    with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already in use"):
        await InferenceServer(ScriptedHandler(), address).start()
    await first.stop(0.1)


async def test_replicas_may_share_a_port_when_asked() -> None:
    options = ChannelOptions(reuse_port=True)
    first = InferenceServer(ScriptedHandler(), "127.0.0.1:0", options=options)
    address = await first.start()
    second = InferenceServer(ScriptedHandler(), address, options=options)
    assert await second.start() == address
    await first.stop(0.1)
    async with SpecrayClient(address) as client:
        assert await client.info(timeout_s=DEADLINE_S) == SERVICE_INFO
    await second.stop(0.1)


def test_new_event_loop_is_a_fresh_loop_each_time() -> None:
    loops = [new_event_loop(), new_event_loop()]
    assert loops[0] is not loops[1]
    for loop in loops:
        loop.close()
