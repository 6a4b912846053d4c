"""The real clock; everything else in the router takes an interfaces.Clock."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """interfaces.Clock over the monotonic clock and the event loop."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits in real time."""
        await asyncio.sleep(seconds)
