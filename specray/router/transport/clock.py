"""Time in the router: the real clock, deadlines and alarms. Everything else takes an interfaces.Clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from specray.interfaces import Clock

T = TypeVar("T")


class SystemClock:
    """interfaces.Clock over the monotonic clock and the event loop."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def within(clock: Clock, seconds: float, awaitable: Awaitable[T]) -> T:
    """Waits for ``awaitable`` for at most ``seconds`` on ``clock``; then it is cancelled.

    Raises:
        TimeoutError: the time is over.
    """
    task = asyncio.ensure_future(awaitable)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        timer.cancel()
        if not task.done():
            task.cancel()


class Alarm:
    """Wakes its owner at or before each time that was asked for; spurious calls are normal."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._set_for: float | None = None
        self._task: asyncio.Task[None] | None = None

    def set(self, at: float) -> None:
        """Asks for a call at ``at``. Free of cost while an earlier call is due anyway."""
        if self._set_for is not None and self._set_for <= at:
            return
        self.cancel()
        self._set_for = at
        self._task = asyncio.get_running_loop().create_task(self._sleep(at - self._clock.monotonic()))

    def cancel(self) -> None:
        """Forgets what was asked for."""
        if self._task is not None:
            self._task.cancel()
        self._task = None
        self._set_for = None

    async def _sleep(self, seconds: float) -> None:
        # Never zero: a deadline that rounds to just ahead of now must not make the loop spin.
        await self._clock.sleep(max(1e-4, seconds))
        self._task = None
        self._set_for = None
        self._ring()
