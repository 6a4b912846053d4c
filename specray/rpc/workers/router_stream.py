"""Server end of one router's stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import grpc
from grpc import aio

from specray.errors import ProtocolError
from specray.rpc.codec.values import RequestBatch
from specray.rpc.role import EngineService, ItemT, RepliesT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Status by which a stream ends."""

    code: grpc.StatusCode
    details: str = ""
    drains: bool = False
    """True if pending requests are answered first."""


class RouterStream(Generic[ItemT, RepliesT]):
    """Reads requests and writes replies, on the event loop.

    With ``max_pending`` unanswered requests the stream is not read, and gRPC's flow control holds the router
    back.
    """

    def __init__(
        self,
        role: EngineService[ItemT, RepliesT],
        context: aio.ServicerContext[Any, Any],
        *,
        max_pending: int,
    ) -> None:
        self._role = role
        self._context = context
        self._room = asyncio.Semaphore(max_pending)
        self._num_pending = 0
        self._outbox: deque[tuple[RepliesT | None, int]] = deque()
        self._has_output = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.is_open = True

    def deliver(self, replies: RepliesT | None, num_requests: int) -> None:
        """Queues replies (None: there are none), which complete ``num_requests`` requests of this stream."""
        self._outbox.append((replies, num_requests))
        self._has_output.set()

    def end(self, ending: Ending) -> None:
        """Makes ``serve`` return; the first ending counts."""
        if not self._ending.done():
            self._ending.set_result(ending)

    async def serve(self, submit: Callable[[RequestBatch[ItemT]], None]) -> Ending:
        """Passes requests to ``submit`` and writes delivered replies, until the stream ends."""
        reader = asyncio.create_task(self._read(submit))
        writer = asyncio.create_task(self._write())
        try:
            ending = await self._ending
            reader.cancel()
            if ending.drains:
                await self._is_idle.wait()
            return ending
        finally:
            self.is_open = False
            reader.cancel()
            writer.cancel()

    async def _read(self, submit: Callable[[RequestBatch[ItemT]], None]) -> None:
        try:
            while True:
                await self._room.acquire()
                data = await self._context.read()
                if data is aio.EOF:
                    self.end(Ending(grpc.StatusCode.OK, drains=True))
                    return
                batch = self._role.decode_request(data)
                self._num_pending += 1
                self._is_idle.clear()
                submit(batch)
        except ProtocolError as error:
            self.end(Ending(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        except Exception as error:
            self._fail("reading", error)

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    replies, num_requests = self._outbox.popleft()
                    if replies is not None:
                        await self._context.write(self._role.encode_replies(replies))
                    self._settle(num_requests)
                self._has_output.clear()
                await self._has_output.wait()
        except Exception as error:
            self._fail("writing", error)

    def _settle(self, num_requests: int) -> None:
        self._num_pending -= num_requests
        for _ in range(num_requests):
            self._room.release()
        if self._num_pending == 0 and not self._outbox:
            self._is_idle.set()

    def _fail(self, action: str, error: Exception) -> None:
        if not self._context.done():
            logger.error("%s a stream of the %s failed", action, self._role.name, exc_info=error)
        self.end(Ending(grpc.StatusCode.INTERNAL, f"{action} the stream failed"))
