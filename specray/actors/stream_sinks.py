"""The router's end of delivery: one connection per ingress that waits for streams."""

from __future__ import annotations

import asyncio
import logging

from specray.errors import EngineLostError, SpecrayError
from specray.interfaces import Clock
from specray.router.output.stream_sink import StreamSink
from specray.rpc.channel import ChannelOptions
from specray.rpc.delivery import DeliveryConnection

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Seconds to connect to an ingress, and for it to take a message."""


class StreamSinks:
    """Stream sinks by ingress address, on one event loop. An unreachable ingress fails its requests.

    Args:
        interval_s: minimum seconds between messages to one ingress; first and last chunks do not wait.
        options: gRPC options of the connections.
    """

    def __init__(self, clock: Clock, *, interval_s: float, options: ChannelOptions) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._options = options
        self._sinks: dict[str, StreamSink] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def set_interval(self, interval_s: float) -> None:
        """Sets the minimum seconds between messages to one ingress."""
        self._interval_s = interval_s
        for sink in self._sinks.values():
            sink.set_interval(interval_s)

    def to(self, address: str) -> StreamSink:
        """Returns the sink to the ingress at ``address``, which is connected in the background."""
        sink = self._sinks.get(address)
        if sink is None:
            sink = self._sinks[address] = StreamSink(self._clock, self._interval_s)
            task = asyncio.create_task(self._send_all(address, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return sink

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_all(self, address: str, sink: StreamSink) -> None:
        reason: SpecrayError = EngineLostError("the router stopped; the request may be sent again")
        try:
            connection = await DeliveryConnection.connect(address, timeout_s=TIMEOUT_S, options=self._options)
            # While nothing is sent, only this notices that the ingress is gone.
            watch = asyncio.create_task(connection.wait_closed())

            def on_closed(_: asyncio.Task[None]) -> None:
                sink.fail(EngineLostError(f"ingress at {address} has ended"))

            watch.add_done_callback(on_closed)
            try:
                while True:
                    await connection.send(await sink.batch())
            finally:
                # The error that ended sending is the reason, not the closing that follows.
                watch.remove_done_callback(on_closed)
                watch.cancel()
                await connection.close()
        except SpecrayError as error:
            reason = error
            logger.warning("%s", error)
        except Exception as error:
            reason = EngineLostError(f"the connection to the ingress failed: {type(error).__name__}")
            logger.exception("the connection to the ingress at %s failed", address)
        finally:
            # The next request reconnects.
            self._sinks.pop(address, None)
            sink.fail(reason)
