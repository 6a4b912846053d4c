"""The ingress's end of delivery, which receives the chunks of streams from routers."""

from __future__ import annotations

from collections.abc import Sequence

from specray.requests import OutputChunk
from specray.router.output.delivery import Delivery
from specray.rpc.channel import ChannelOptions
from specray.rpc.delivery import DeliveryServer


class Mailbox:
    """Deliveries by request id, filled by the router that has the request.

    Chunks wait here for a slow client, at most the tokens of its request. Chunks of requests that are not
    open are dropped, because their client has left.

    Args:
        address: address to listen on, ``unix:/path`` or ``host:0``.

    Raises:
        ConfigError: the address is not valid.
    """

    def __init__(self, address: str, *, options: ChannelOptions | None = None) -> None:
        self._server = DeliveryServer(self.put, address, options=options)
        self._open: dict[str, Delivery] = {}

    @property
    def address(self) -> str:
        """Address for routers; after ``start``."""
        return self._server.address

    async def start(self) -> None:
        """Listens on this event loop. Raises ConfigError when the address cannot be listened on."""
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    def open(self, request_id: str) -> Delivery:
        """Keeps the request's chunks from now on, until ``close``."""
        assert request_id not in self._open, "request ids are drawn at random"
        delivery = self._open[request_id] = Delivery(request_id, is_stream=True)
        return delivery

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def put(self, chunks: Sequence[OutputChunk]) -> None:
        for chunk in chunks:
            delivery = self._open.get(chunk.request_id)
            if delivery is not None and not delivery.is_ended:
                delivery.put(chunk)
