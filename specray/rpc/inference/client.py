"""Client of the public gRPC service, for users and tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import grpc
from grpc import aio

from specray.requests import ServiceInfo
from specray.rpc.channel import ChannelOptions, parse_peer
from specray.rpc.codec.inference import decode_generate_event, decode_service_info, encode_generate_request
from specray.rpc.inference.server import INFERENCE_SERVICE
from specray.rpc.inference.types import GenerateEvent, GenerateParams
from specray.rpc.status import error_of


class SpecrayClient:
    """Calls one service; an async context manager.

    Example::

        async with SpecrayClient("127.0.0.1:9000") as client:
            async for event in client.generate(GenerateParams(text="def add(a, b):", max_tokens=32)):
                print(event.text, end="")
    """

    def __init__(
        self, address: str, *, key: str | None = None, options: ChannelOptions | None = None
    ) -> None:
        """Opens a channel.

        Args:
            key: API key, for a service that requires one.

        Raises:
            ConfigError: the address is neither ``unix:/path`` nor ``host:port``.
        """
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._channel = aio.insecure_channel(
            parse_peer(address).target,
            options=(options or ChannelOptions()).for_client(),
            compression=grpc.Compression.NoCompression,
        )

    async def generate(
        self, params: GenerateParams, *, timeout_s: float = 600.0
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Streams the answer; closing the iterator cancels the request.

        Args:
            timeout_s: total seconds for the answer.

        Raises:
            InvalidRequestError, ModelNotFoundError: the request is wrong.
            UnauthenticatedError: the service requires a key, and does not know this one.
            OverloadedError: try again after ``retry_after_s``.
            DeadlineExceededError: the time is over.
            EngineLostError: the service is unreachable; the request may be retried.
            SpecrayError: the service failed.
        """
        data = encode_generate_request(params)
        stub: aio.UnaryStreamMultiCallable[bytes, bytes]
        stub = self._channel.unary_stream(f"/{INFERENCE_SERVICE}/Generate", None, None)
        call = stub(data, timeout=timeout_s, metadata=(*self._metadata, *_metadata_of(params)))
        try:
            async for message in call:
                yield decode_generate_event(message)
        except aio.AioRpcError as error:
            raise error_of(error) from None
        finally:
            call.cancel()

    async def info(self, *, timeout_s: float = 10.0) -> ServiceInfo:
        """Asks which model is served, and for its limits.

        Raises:
            DeadlineExceededError: nobody answers in time.
            EngineLostError: the service is unreachable.
        """
        stub: aio.UnaryUnaryMultiCallable[bytes, bytes]
        stub = self._channel.unary_unary(f"/{INFERENCE_SERVICE}/Info", None, None)
        try:
            return decode_service_info(await stub(b"", timeout=timeout_s, metadata=self._metadata))
        except aio.AioRpcError as error:
            raise error_of(error) from None

    async def close(self) -> None:
        """Ends the connection and every call on it; idempotent."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _metadata_of(params: GenerateParams) -> list[tuple[str, str]]:
    values = {"traceparent": params.traceparent, "x-request-id": params.client_request_id}
    return [(name, value) for name, value in values.items() if value]
