"""Delivery stream, both ends: carries output chunks from a router to the ingress that waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import grpc
from grpc import aio

from specray.errors import ConfigError, EngineLostError, ProtocolError
from specray.requests import OutputChunk
from specray.rpc.channel import ChannelOptions, bind, open_channel, parse_address, parse_peer
from specray.rpc.codec.delivery import decode_chunks, encode_chunks
from specray.rpc.connection import calling

logger = logging.getLogger(__name__)

DELIVERY_SERVICE: Final = "specray.v1.DeliveryService"
STOP_GRACE_S: Final = 1.0
ACCEPTED: Final = "accepted"
"""Key of the initial metadata that says the router was admitted; refused calls have initial metadata too."""

BytesStream = aio.StreamStreamCall[bytes, bytes]
Receiver = Callable[[Sequence[OutputChunk]], None]


class DeliveryServer:
    """The ingress's end: passes chunks to ``receive``, on the event loop that started it.

    Args:
        receive: takes the chunks of one message; must not raise.
        address: ``unix:/path`` or ``host:port``, port 0 for a free one.

    Raises:
        ConfigError: the address is not valid.
    """

    def __init__(self, receive: Receiver, address: str, *, options: ChannelOptions | None = None) -> None:
        self._receive = receive
        self._address = parse_address(address)
        self._options = options or ChannelOptions()
        self._server: aio.Server | None = None

    @property
    def address(self) -> str:
        """Address of the server; after ``start`` with the real port."""
        return self._address.target

    async def start(self) -> None:
        """Listens. Raises ConfigError when the address is in use, not writable, or not of this machine."""
        server = aio.server(options=self._options.for_server(), compression=grpc.Compression.NoCompression)
        # No (de)serialisers: messages stay bytes, so that this code answers broken ones.
        deliver: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(DELIVERY_SERVICE, {"Deliver": deliver}),)
        )
        self._address = bind(server, self._address, self._options)
        self._server = server
        await server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_GRACE_S)

    async def _serve(self, _: object, context: aio.ServicerContext[Any, Any]) -> None:
        await self._options.security.admit(context)
        await context.send_initial_metadata(((ACCEPTED, "1"),))
        try:
            while (data := await context.read()) is not aio.EOF:
                self._receive(decode_chunks(data))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class DeliveryConnection:
    """The router's end; made by :meth:`connect`."""

    def __init__(self, address: str, channel: aio.Channel, stream: BytesStream, timeout_s: float) -> None:
        self._address = address
        self._channel = channel
        self._stream = stream
        self._timeout_s = timeout_s

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float, options: ChannelOptions | None = None) -> Self:
        """Opens the stream to the ingress at ``address``.

        Args:
            timeout_s: seconds to connect, and again for every send.

        Raises:
            EngineLostError: nobody answers in time, or the ingress refuses the router.
        """
        options = options or ChannelOptions()
        try:
            channel, metadata = open_channel(parse_peer(address), options), options.security.metadata()
        except ConfigError as error:
            raise EngineLostError(f"{_name(address)}: {error}") from None
        try:
            async with calling(_name(address), timeout_s, "no answer within"):
                stream: BytesStream
                stream = channel.stream_stream(f"/{DELIVERY_SERVICE}/Deliver", None, None)(metadata=metadata)
                if ACCEPTED not in (await stream.initial_metadata() or ()):
                    reason = f"{(await stream.code()).name}: {await stream.details()}"
                    raise EngineLostError(f"{_name(address)}: {reason}")
        except BaseException:
            await channel.close(None)
            raise
        return cls(address, channel, stream, timeout_s)

    async def send(self, chunks: Sequence[OutputChunk]) -> None:
        """Sends one message. Raises EngineLostError when the ingress is gone or takes nothing."""
        async with calling(_name(self._address), self._timeout_s, "took nothing for"):
            await self._stream.write(encode_chunks(chunks))

    async def wait_closed(self) -> None:
        await self._stream.code()

    async def close(self) -> None:
        self._stream.cancel()
        await self._channel.close(None)


def _name(address: str) -> str:
    return f"ingress at {address}"
