"""Runs full garbage collections when nobody waits for them.

A full collection visits every live object. In an ingress with 320 requests under way these are 130,000, and
on a busy core each collection took 95 ms: whatever came in that time was refused too late. It freed nothing,
since no object of a request is in a cycle; so it may wait until there is little to visit.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Final

THRESHOLDS: Final = (500, 5, 1_000_000)
"""Thresholds of Python's own collections: young objects often, all objects never. The first number counts
objects made less objects freed, old ones included: where requests come as others end it is seldom reached,
and at 2000 most live objects were young by then (40 to 100 ms each time). A request makes 400 at once."""
NUM_CALM: Final = 8
"""Largest number of requests under way at which nobody notices the few milliseconds."""
CALM_INTERVAL_S: Final = 30.0
LONGEST_S: Final = 600.0
"""Longest time in seconds between collections, also under load: there may be garbage all the same."""
_LOOK_S: Final = 1.0


class Collector:
    """Takes over full collections of its process from Python.

    Args:
        num_under_way: returns the number of requests under way.
        collect: runs a full collection.
        monotonic: clock in seconds; all time is read from it.
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
        """Runs until it is cancelled. Objects that live at its start are frozen; at its end Python collects
        again."""
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
        """Collects if it is time."""
        passed_s = self._monotonic() - self._collected_s
        is_calm = self._num_under_way() <= NUM_CALM and passed_s >= CALM_INTERVAL_S
        if is_calm or passed_s >= LONGEST_S:
            self._collect()
            self._collected_s = self._monotonic()
