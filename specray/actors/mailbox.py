"""The ingress's end of delivery: where routers bring the chunks of streams."""

from __future__ import annotations

from collections.abc import Sequence

from specray.requests import OutputChunk
from specray.router.output.delivery import Delivery
from specray.rpc.channel import ChannelOptions
from specray.rpc.delivery import DeliveryServer


class Mailbox:
    """Deliveries by request, filled by whichever router has the request.

    Chunks wait here for a slow client, at most the tokens of its request; requests that are not open are
    ignored, as their client has left.

    Args:
        address: where routers reach it, ``unix:/path`` or ``host:0``.

    Raises:
        ConfigError: the address is no address.
    """

    def __init__(self, address: str, *, options: ChannelOptions | None = None) -> None:
        self._server = DeliveryServer(self._put, address, options=options)
        self._open: dict[str, Delivery] = {}

    @property
    def address(self) -> str:
        """After ``start``: what a router is told."""
        return self._server.address

    async def start(self) -> None:
        """Listens, on this event loop. Raises ConfigError: the address cannot be listened on."""
        await self._server.start()

    async def stop(self) -> None:
        """Takes nothing more; idempotent."""
        await self._server.stop()

    def open(self, request_id: str) -> Delivery:
        """From now on the request's chunks are kept, until ``close``."""
        assert request_id not in self._open, "request ids are drawn at random"
        delivery = self._open[request_id] = Delivery(request_id, is_stream=True)
        return delivery

    def close(self, request_id: str) -> None:
        """Nobody waits for the request any more."""
        self._open.pop(request_id, None)

    def _put(self, chunks: Sequence[OutputChunk]) -> None:
        for chunk in chunks:
            delivery = self._open.get(chunk.request_id)
            if delivery is not None and not delivery.is_ended:
                delivery.put(chunk)
