"""Whether the service can answer: what /ready says, and what the gRPC health service is told of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from specray.errors import EngineLostError
from specray.interfaces import RouterClient

logger = logging.getLogger(__name__)

READY_TIMEOUT_S: Final = 30.0
WATCH_INTERVAL_S: Final = 5.0
"""Who balances load by the health service sees a lost target this much later. A router that has work answers
from its last verdicts; one that has none does a step of one token, which costs some milliseconds."""


async def check_ready(client: RouterClient) -> None:
    """Raises EngineLostError unless the target does a step, or did one in the last seconds."""
    async with answer_within(READY_TIMEOUT_S, "step of the target"):
        await client.check_ready()


async def watch_ready(client: RouterClient, set_ready: Callable[[bool], Awaitable[None]]) -> None:
    """Tells what ``check_ready`` finds, until it is cancelled; whoever is told begins as not ready."""
    was_ready = False
    while True:
        try:
            await check_ready(client)
            is_ready = True
        except Exception as error:
            # Whatever it is: nothing may end the watch, or the last word would be believed for ever.
            is_ready = False
            if was_ready:
                logger.warning("not ready: %s", error)
        if is_ready != was_ready:
            await set_ready(is_ready)
        was_ready = is_ready
        await asyncio.sleep(WATCH_INTERVAL_S)


@asynccontextmanager
async def answer_within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Raises EngineLostError, naming what did not come, when the block takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineLostError(f"no {what} within {timeout_s:g} s") from None
