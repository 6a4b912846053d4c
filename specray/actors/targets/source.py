"""Source of a router's target connection, which rebuilds the group of ranks when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from specray.errors import EngineLostError
from specray.interfaces import Clock, Verifier
from specray.router.transport.clock import SystemClock, within

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
"""Seconds in which a group whose connection was lost must complete a step to stay."""


class RankGroup(Protocol):
    """The ranks of one target, as actors.targets.group.TargetGroup."""

    async def start(self) -> str:
        """Returns the leader's address. Raises ConfigError or EngineLostError; no rank is left then."""
        ...

    async def memory_bytes(self) -> int:
        """Bytes of all ranks. Raises what a lost rank raises."""
        ...

    async def ended(self) -> str:
        """Waits until a rank can no longer work; returns the reason."""
        ...

    async def check(self) -> None:
        """Runs a real step of all ranks. Raises EngineLostError."""
        ...

    def stop(self) -> None:
        """Kills every rank, even one that hangs; idempotent."""
        ...

    async def end(self) -> None:
        """Ends working ranks in order; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class _Running:
    group: RankGroup
    address: str
    watch: asyncio.Task[None]
    """Task that is done when a rank has ended."""


class TargetSource:
    """One target for one router: at most one group at a time, and only complete ones.

    Args:
        make_group: makes a group whose ranks do not run yet.
        connect: connects to a leader's address.
        clock: times the wait for a step.
    """

    def __init__(
        self,
        make_group: Callable[[], RankGroup],
        connect: Callable[[str], Awaitable[Verifier]],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._make_group = make_group
        self._connect_to = connect
        self._clock = clock or SystemClock()
        self._running: _Running | None = None
        self.num_starts = 0

    async def connect(self) -> Verifier:
        """Connects anew after a connection was lost: to the same group if it still completes a step.

        Raises:
            ConfigError: a setting is wrong.
            EngineLostError: the group could not be started or reached; the next call starts another.
        """
        if self._running is not None and not await self._works(self._running):
            self.stop()
        running = self._running or await self._start()
        try:
            return await self._connect_to(running.address)
        except BaseException:
            self.stop()
            raise

    async def memory_bytes(self) -> int:
        """Bytes of the group that runs; 0: there is none. Raises what a lost rank raises."""
        return 0 if self._running is None else await self._running.group.memory_bytes()

    def stop(self) -> None:
        if (group := self._take()) is not None:
            group.stop()

    async def end(self) -> None:
        if (group := self._take()) is not None:
            await group.end()

    def _take(self) -> RankGroup | None:
        running, self._running = self._running, None
        if running is None:
            return None
        running.watch.cancel()
        return running.group

    async def _start(self) -> _Running:
        group = self._make_group()
        began_s = self._clock.monotonic()
        address = await group.start()
        self.num_starts += 1
        logger.info("target group started in %.1f s", self._clock.monotonic() - began_s)
        self._running = _Running(group, address, asyncio.create_task(self._watch(group)))
        return self._running

    async def _watch(self, group: RankGroup) -> None:
        reason = await group.ended()
        logger.error("%s", reason)
        # The other ranks, and so the router, would wait for the ended one.
        group.stop()

    async def _works(self, running: _Running) -> bool:
        if running.watch.done():
            return False
        try:
            await within(self._clock, PROBE_TIMEOUT_S, running.group.check())
        except (EngineLostError, TimeoutError) as error:
            logger.error("the target group is given up: %s", str(error) or "no step in time")
            return False
        return not running.watch.done()
