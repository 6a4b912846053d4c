"""Busy meter: the share of time that an engine computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class BusyMeter:
    """Exponentially weighted share of time spent in engine calls.

    One thread reports calls; any thread may read.

    Args:
        monotonic: clock in seconds that never goes back.
        window_s: time constant of the average in seconds: time n seconds ago has exp(-n / window_s) of the
            weight of now.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, window_s: float = 10.0) -> None:
        self._monotonic = monotonic
        self._window_s = window_s
        # Replaced as a whole, so that a reader on another thread never sees a partial update.
        self._state = (0.0, monotonic(), False)

    def begin(self) -> None:
        self._advance(is_busy=True)

    def end(self) -> None:
        self._advance(is_busy=False)

    @property
    def share(self) -> float:
        """Busy share of about the last ``window_s`` seconds, 0..1, including the call in progress."""
        return self._share_at(self._monotonic())

    @property
    def call_s(self) -> float:
        """Seconds since the call in progress began; 0 without one."""
        _, since_s, is_busy = self._state
        return self._monotonic() - since_s if is_busy else 0.0

    def _share_at(self, now: float) -> float:
        share, since_s, is_busy = self._state
        kept = math.exp(min(0.0, since_s - now) / self._window_s)
        return share * kept + (1.0 - kept if is_busy else 0.0)

    def _advance(self, *, is_busy: bool) -> None:
        now = self._monotonic()
        self._state = (self._share_at(now), now, is_busy)
