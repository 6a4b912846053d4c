"""A stream of deltas whose first one is on its way while the headers of its answer may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from specray.serving.generation import Delta, close


class StartedStream:
    """Deltas of one call; must be made within the event loop, and closed.

    Args:
        deltas: nobody else reads or closes them.
    """

    def __init__(self, deltas: AsyncIterator[Delta]) -> None:
        self._deltas = deltas
        self._first: asyncio.Task[Delta | None] = asyncio.create_task(self._next())
        self._is_begun = False

    async def wait(self, grace_s: float) -> None:
        """Waits until the first delta is there, or for ``grace_s`` seconds.

        Raises:
            Exception: the call has failed meanwhile.
        """
        done, _ = await asyncio.wait({self._first}, timeout=grace_s)
        if done:
            self._first.result()

    async def _next(self) -> Delta | None:
        return await anext(self._deltas, None)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._is_begun:
            return await anext(self._deltas)
        delta = await asyncio.shield(self._first)
        self._is_begun = True
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Gives up what has not come; the router aborts it. Idempotent."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await close(self._deltas)
