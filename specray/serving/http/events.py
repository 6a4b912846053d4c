"""Server-sent events, and cancellation of work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specray.serving.generation import Delta, close

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


class StartedStream:
    """A stream of deltas whose first one is on its way while the headers of its answer may leave.

    It is made on the event loop, and closed.

    Args:
        deltas: nobody else takes or closes them.
    """

    def __init__(self, deltas: AsyncIterator[Delta]) -> None:
        self._deltas = deltas
        self._first: asyncio.Task[Delta | None] = asyncio.create_task(self._from_source())
        self._is_begun = False

    async def wait(self, grace_s: float) -> None:
        """Waits until the first delta is there, or for ``grace_s`` seconds.

        Raises:
            Exception: the call has failed meanwhile.
        """
        done, _ = await asyncio.wait({self._first}, timeout=grace_s)
        if done:
            self._first.result()

    async def next(self) -> Delta | None:
        """Returns the next delta; None: there is none. Raises what the router raises."""
        if self._is_begun:
            return await self._from_source()
        delta = await asyncio.shield(self._first)
        self._is_begun = True
        return delta

    async def _from_source(self) -> Delta | None:
        return await anext(self._deltas, None)

    async def aclose(self) -> None:
        """Gives up what has not come; the router aborts it. Idempotent."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await close(self._deltas)


class EventStreamResponse(Response):
    """A response that sends events as they come, and closes their iterator when the client leaves.

    The headers leave at once. While nothing comes, a comment keeps the connection alive: proxies end one on
    which nothing moves for a minute.

    Args:
        events: the events, which are made from ``source``.
        source: closed at the end, too, also if no event was asked for.
        keep_alive_s: longest silence in seconds.
        comment: what is sent into it; clients leave it out.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        source: StartedStream,
        *,
        # Seconds after which a stream on which nothing happens gets a comment.
        keep_alive_s: float = 15.0,
        comment: bytes,
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._keep_alive_s = keep_alive_s
        self._comment = comment
        self._is_sending = False
        self._sent_s = 0.0
        """Time of the last message's end on the loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            return
        finally:
            await close(self._events)
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_s = asyncio.get_running_loop().time()
        # One sleeper per stream: a task per event would take cores from the engines.
        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            async for event in self._events:
                if event:
                    await self._send_part(send, event)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, part: bytes) -> None:
        self._is_sending = True
        try:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            self._is_sending = False
            self._sent_s = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self._keep_alive_s - loop.time()))
            is_silent = loop.time() >= self._sent_s + self._keep_alive_s
            if self._is_sending:
                # The client does not read what there is.
                await asyncio.sleep(self._keep_alive_s)
            elif is_silent:
                await self._send_part(send, self._comment)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
