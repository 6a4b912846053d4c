"""Server-sent events, and cancellation of work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specray.serving.generation import close

SEND_TIMEOUT_S: Final = 30.0
"""Seconds for which a full buffer may wait for its client to read. A client that reads at all empties it in a
moment; one that does not would hold a place in the routers, for tokens that nobody sees."""

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work``, and cancels it if the client leaves or this call is cancelled.

    Args:
        receive: channel of the request, whose body has been read.
        work: the work for which the client waits.

    Raises:
        ClientDisconnect: the client left first.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStreamResponse(Response):
    """A response that sends events as they come, and closes their iterator when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            return  # A client that does not read raises TimeoutError, an OSError too: see ``timely``.
        finally:
            await close(self._events)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            if event:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def timely(send: Send) -> Send:
    """Wraps ``send`` so that it raises TimeoutError if the client has not read for SEND_TIMEOUT_S.

    Servers wait without limit for a client that keeps its connection open and reads nothing.
    """

    async def timely_send(message: Message) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)

    return timely_send


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
