"""Tells whether the service can answer, for /health, /ready and the gRPC health service."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from specray.errors import EngineLostError
from specray.interfaces import RouterClient

logger = logging.getLogger(__name__)

READY_TIMEOUT_S: Final = 30.0
FRESH_S: Final = 4.0
"""Seconds for which the gRPC health service repeats what was found. A router with work answers from its last
verdicts; one without runs a step of one token. One every 5 s, asked for or not, took half a percent of a core
for a target of 135M parameters."""

ALIVE_TIMEOUT_S: Final = 1.0
ALIVE_GRACE_S: Final = 30.0
"""Seconds without a Router after which nothing can be answered. A Router that dies is replaced within them,
unless its target is large."""


class Liveness:
    """Whether any Router answers, which is cheap to ask. Its target is left to ``check_ready``."""

    def __init__(self, client: RouterClient, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._monotonic = monotonic
        self._answered_s = -math.inf

    async def check(self) -> None:
        """Raises EngineLostError if no Router has answered for ALIVE_GRACE_S, or since the start."""
        if self._monotonic() - self._answered_s < ALIVE_TIMEOUT_S:
            return
        try:
            async with asyncio.timeout(ALIVE_TIMEOUT_S):
                await self._client.service_info()
        # Whatever keeps a Router from answering.
        except Exception:
            if self._monotonic() - self._answered_s >= ALIVE_GRACE_S:
                raise EngineLostError("no Router answers") from None
        else:
            self._answered_s = self._monotonic()


async def check_ready(client: RouterClient) -> None:
    """Raises EngineLostError unless the target runs a step, or ran one in the last seconds."""
    async with answer_within(READY_TIMEOUT_S, "step of the target"):
        await client.check_ready()


class ReadyStatus:
    """What ``check_ready`` has found; the first status is not ready.

    Args:
        set_ready: told of each change.
    """

    def __init__(self, client: RouterClient, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._client = client
        self._set_ready = set_ready
        self._turn = asyncio.Lock()
        self._looked_s = -math.inf
        self._was_ready = False

    async def look(self) -> None:
        """Asks anew, unless it has within FRESH_S; whoever calls meanwhile waits for the same answer."""
        async with self._turn:
            if time.monotonic() - self._looked_s < FRESH_S:
                return
            try:
                await check_ready(self._client)
                is_ready = True
            # Any error counts: the last status would stand otherwise.
            except Exception as error:
                is_ready = False
                if self._was_ready:
                    logger.warning("not ready: %s", error)
            if is_ready != self._was_ready:
                await self._set_ready(is_ready)
            self._was_ready, self._looked_s = is_ready, time.monotonic()


@asynccontextmanager
async def answer_within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Raises EngineLostError, naming what did not come, if the block takes longer than ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineLostError(f"no {what} within {timeout_s:g} s") from None
