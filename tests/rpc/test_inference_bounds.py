"""Bounds of the public gRPC service: what ends calls without messages, and what anybody may leave open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.errors import UnauthenticatedError
from specray.rpc.channel import ChannelOptions
from specray.rpc.inference import messages
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import AdmittedCall, Incoming
from tests.rpc.engines import ScriptedHandler

GENERATE = "/specray.v1.InferenceService/Generate"
INFO = "/specray.v1.InferenceService/Info"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@asynccontextmanager
async def channel_to(**options: Any) -> AsyncIterator[aio.Channel]:
    server = InferenceServer(ScriptedHandler(), "127.0.0.1:0", **options)
    await server.start()
    try:
        async with aio.insecure_channel(
            server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            yield channel
    finally:
        await server.stop(0)


def begun(channel: aio.Channel, method: str) -> Any:
    """A call of which only the metadata is sent."""
    return channel.stream_stream(method, None, None)()


async def code_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(10):
        code: grpc.StatusCode = await call.code()
        return code


@contextmanager
def nobody(call: Incoming) -> Iterator[AdmittedCall]:
    raise UnauthenticatedError("an API key is missing")
    yield


@pytest.mark.parametrize("method", [GENERATE, INFO])
async def test_key_is_asked_for_before_a_message_comes(method: str) -> None:
    async with channel_to(admit=nobody) as channel:
        assert await code_of(begun(channel, method)) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_message_without_a_key_is_not_received(compression: grpc.Compression | None) -> None:
    # One that is too long would be RESOURCE_EXHAUSTED.
    async with channel_to(admit=nobody, options=ChannelOptions(max_receive_bytes=1024)) as channel:
        call = channel.unary_stream(GENERATE, None, None)(bytes(1 << 20), compression=compression)
        assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_message_that_is_inflated_beyond_its_bound_is_refused() -> None:
    async with channel_to(options=ChannelOptions(max_receive_bytes=64 * 1024)) as channel:
        call = channel.unary_stream(GENERATE, None, None)(bytes(8 << 20), compression=grpc.Compression.Gzip)
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", [GENERATE, INFO, CHECK, REFLECTION])
async def test_call_without_a_message_ends_by_its_time(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MESSAGE_TIMEOUT_S", 0.05)
    async with channel_to(has_reflection=True) as channel:
        call = begun(channel, method)
        assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "no message came within 0.05 s"


@pytest.mark.parametrize("method", [GENERATE, INFO, CHECK])
async def test_call_that_ends_without_a_message_is_wrong(method: str) -> None:
    async with channel_to() as channel:
        call = begun(channel, method)
        await call.done_writing()
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_open_calls_of_anybody_are_bounded_and_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_OPEN_CALLS", 3)
    async with channel_to(has_reflection=True) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        watches = []
        for _ in range(3):
            watches.append(health.Watch(health_pb2.HealthCheckRequest()))
            await watches[-1].read()
        check = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        assert await code_of(watches[0]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not watches[1].done() and not watches[2].done()
        begun(channel, REFLECTION)
        for _ in range(2):
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == check.status


async def test_open_calls_for_what_is_served_take_no_places_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_OPEN_CALLS", 2)
    async with channel_to(max_calls=4) as channel:
        calls: list[Any] = []
        for _ in range(2):
            calls.append(begun(channel, INFO))
            await asyncio.sleep(0.05)  # So that they arrive in order.
        for _ in range(4):
            calls.append(begun(channel, INFO))
            assert await code_of(calls.pop(0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in calls)
        generate = begun(channel, GENERATE)
        await generate.done_writing()
        assert await code_of(generate) is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_of_all_services_together_are_bounded() -> None:
    async with channel_to(max_calls=2) as channel:
        calls = [begun(channel, GENERATE) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await code_of(begun(channel, GENERATE)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in calls)


async def test_unknown_method_is_unimplemented_at_once() -> None:
    async with channel_to() as channel:
        for method in ("/specray.v1.InferenceService/Nothing", "/nobody.Service/Nothing"):
            assert await code_of(begun(channel, method)) is grpc.StatusCode.UNIMPLEMENTED


def test_service_for_anybody_bounds_its_connections() -> None:
    bounded = dict(ChannelOptions(max_connections=7).for_server())
    assert bounded["grpc.max_allowed_incoming_connections"] == 7
    assert bounded["grpc.server_handshake_timeout_ms"] == 10_000
    assert bounded["grpc.max_connection_idle_ms"] == 90_000
    assert bounded["grpc.max_concurrent_streams"] == 100
    assert "grpc.max_allowed_incoming_connections" not in dict(ChannelOptions().for_server())


async def test_calls_of_one_connection_wait_in_their_client_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specray.rpc.channel.MAX_STREAMS", 2)
    async with channel_to(options=ChannelOptions(max_connections=7)) as channel:
        await channel.channel_ready()
        calls = [begun(channel, GENERATE) for _ in range(2)]
        await asyncio.sleep(0.1)
        calls.append(begun(channel, GENERATE))
        ending = asyncio.create_task(calls[2].done_writing())
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls)
        calls[0].cancel()
        await ending
        assert await code_of(calls[2]) is grpc.StatusCode.INVALID_ARGUMENT
        assert not calls[1].done()


async def test_connections_beyond_the_bound_are_closed() -> None:
    server = InferenceServer(ScriptedHandler(), "127.0.0.1:0", options=ChannelOptions(max_connections=2))
    await server.start()
    host, port = server.address.rsplit(":", 1)
    try:
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        ended = [asyncio.create_task(_read_all(reader)) for reader, _ in connections]
        done, _ = await asyncio.wait(ended, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert done == {ended[2]}
        for task in ended:
            task.cancel()
        for _, writer in connections:
            writer.close()
    finally:
        await server.stop(0)


async def _read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(4096):
        pass
