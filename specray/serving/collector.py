"""Garbage collection at a time when nobody waits for it.

A full collection looks at every object that lives. In an ingress with 320 requests under way these are
130,000, and on a busy core it stood still for 95 ms each time: whatever came then was refused too late. It
found nothing, as nothing of a request is in a cycle; so it may wait until there is little to look at.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Final

THRESHOLDS: Final = (500, 5, 1_000_000)
"""Of Python's own collections: never all objects, the young ones often. The first number is of objects made
less objects freed, old ones too: where requests come as others end it is seldom reached, and with 2000 most
of what lived was young by then (40 to 100 ms each time). A request makes 400 at once."""
NUM_CALM: Final = 8
"""Requests under way, of which nobody notices the few milliseconds."""
CALM_INTERVAL_S: Final = 30.0
LONGEST_S: Final = 600.0
"""Then also under load: what was never calm may have garbage all the same."""
_LOOK_S: Final = 1.0


class Collector:
    """Takes full collections of its process over from Python.

    Args:
        num_under_way: requests, now.
        collect: looks at everything.
        monotonic: seconds; all time is read from it.
    """

    def __init__(
        self,
        num_under_way: Callable[[], int],
        *,
        collect: Callable[[], object] = gc.collect,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_under_way = num_under_way
        self._collect = collect
        self._monotonic = monotonic
        self._collected_s = monotonic()

    async def run(self) -> None:
        """Until it is cancelled; then Python collects as before. What lives at its start is frozen."""
        before = gc.get_threshold()
        self._collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        self._collected_s = self._monotonic()
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                self.look()
        finally:
            gc.set_threshold(*before)

    def look(self) -> None:
        """Collects when it is time."""
        passed_s = self._monotonic() - self._collected_s
        is_calm = self._num_under_way() <= NUM_CALM and passed_s >= CALM_INTERVAL_S
        if is_calm or passed_s >= LONGEST_S:
            self._collect()
            self._collected_s = self._monotonic()
