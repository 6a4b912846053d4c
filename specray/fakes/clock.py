"""Virtual clock for tests: when every task waits, time jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClock:
    """interfaces.Clock whose time jumps to the next timer as soon as every task waits.

    ``run`` drives a coroutine on an event loop whose own time is this clock, so ``asyncio.sleep`` and
    ``asyncio.timeout`` are virtual too. Nothing sleeps for real; the same program gives the same schedule.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Virtual seconds since the clock's construction."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Sleeps in virtual time; only inside ``run``."""
        await asyncio.sleep(max(0.0, seconds))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs ``main`` to its end in virtual time.

        Raises:
            RuntimeError: deadlock: every task waits and no timer is set.
        """
        with asyncio.Runner(loop_factory=lambda: _VirtualLoop(self)) as runner:
            return runner.run(main)

    def _advance(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Selector that moves the clock to the next timer instead of blocking."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits and no timer is set: nothing can ever happen")
        if not ready and timeout is not None and timeout > 0:
            self._clock._advance(timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._virtual_clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._virtual_clock.monotonic()
