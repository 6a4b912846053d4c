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
WATCH_INTERVAL_S: Final = 5.0
"""Seconds between checks for the gRPC health service: the delay until a load balancer sees a lost target. A
router with work answers from its last verdicts; one without runs a step of one token, which takes some
milliseconds."""

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


async def watch_ready(client: RouterClient, set_ready: Callable[[bool], Awaitable[None]]) -> None:
    """Reports what ``check_ready`` finds until it is cancelled; the first state is not ready."""
    was_ready = False
    while True:
        try:
            await check_ready(client)
            is_ready = True
        except Exception as error:
            # Any error counts: if it ended the watch, the last report would stand for ever.
            is_ready = False
            if was_ready:
                logger.warning("not ready: %s", error)
        if is_ready != was_ready:
            await set_ready(is_ready)
        was_ready = is_ready
        await asyncio.sleep(WATCH_INTERVAL_S)


@asynccontextmanager
async def answer_within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Raises EngineLostError, naming what did not come, if the block takes longer than ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineLostError(f"no {what} within {timeout_s:g} s") from None
