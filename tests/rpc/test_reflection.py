"""The public service describes itself, by option."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specray.rpc.inference.server import INFERENCE_SERVICE, InferenceServer
from tests.rpc.engines import ScriptedHandler

DEADLINE_S = 10.0
Request = reflection_pb2.ServerReflectionRequest


async def asked(has_reflection: bool, *requests: Request) -> list[reflection_pb2.ServerReflectionResponse]:
    server = InferenceServer(ScriptedHandler(), "127.0.0.1:0", has_reflection=has_reflection)
    await server.start()
    try:
        async with aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter(requests), timeout=DEADLINE_S)
            return [answer async for answer in call]
    finally:
        await server.stop(0)


async def test_services_and_their_messages_are_described() -> None:
    listed, described = await asked(
        True, Request(list_services=""), Request(file_containing_symbol=INFERENCE_SERVICE)
    )
    names = {service.name for service in listed.list_services_response.service}
    assert {INFERENCE_SERVICE, "grpc.health.v1.Health"} <= names
    files = [
        FileDescriptorProto.FromString(data)
        for data in described.file_descriptor_response.file_descriptor_proto
    ]
    messages = {message.name for file in files for message in file.message_type}
    assert {"GenerateRequest", "GenerateResponse"} <= messages


async def test_nothing_is_described_without_the_option() -> None:
    with pytest.raises(aio.AioRpcError) as raised:
        await asked(False, Request(list_services=""))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
