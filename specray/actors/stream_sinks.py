"""The router's end of delivery: one connection for each ingress that waits for streams."""

from __future__ import annotations

import asyncio
import logging

from specray.errors import EngineLostError, SpecrayError
from specray.interfaces import Clock
from specray.router.output.stream_sink import Outlet
from specray.rpc.channel import ChannelOptions
from specray.rpc.delivery import DeliveryConnection

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""For the connection to an ingress, and for it to take a message."""


class Outlets:
    """Lives on one event loop. An ingress that cannot be reached fails the requests that it waits for.

    Args:
        interval_s: at most one message per ingress and interval, but for first and last chunks.
        options: of the connections.
    """

    def __init__(self, clock: Clock, *, interval_s: float, options: ChannelOptions) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._options = options
        self._outlets: dict[str, Outlet] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def to(self, address: str) -> Outlet:
        """The way to the ingress at ``address``; it is connected in the background."""
        outlet = self._outlets.get(address)
        if outlet is None:
            outlet = self._outlets[address] = Outlet(self._clock, self._interval_s)
            task = asyncio.create_task(self._send_all(address, outlet))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return outlet

    async def close(self) -> None:
        """Ends every connection; idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_all(self, address: str, outlet: Outlet) -> None:
        reason: SpecrayError = EngineLostError("the router stopped; the request may be sent again")
        try:
            connection = await DeliveryConnection.connect(address, timeout_s=TIMEOUT_S, options=self._options)
            # While nothing is sent, only this tells that the ingress has gone.
            watch = asyncio.create_task(connection.wait_closed())

            def on_closed(_: asyncio.Task[None]) -> None:
                outlet.fail(EngineLostError(f"ingress at {address} has ended"))

            watch.add_done_callback(on_closed)
            try:
                while True:
                    await connection.send(await outlet.batch())
            finally:
                # What ended the sending is the reason, not that the connection is closed after it.
                watch.remove_done_callback(on_closed)
                watch.cancel()
                await connection.close()
        except SpecrayError as error:
            reason = error
            logger.warning("%s", error)
        except Exception as error:
            reason = EngineLostError(f"the way to the ingress failed: {type(error).__name__}")
            logger.exception("the way to the ingress at %s failed", address)
        finally:
            # The next request tries anew.
            self._outlets.pop(address, None)
            outlet.fail(reason)
