"""How much of the time an engine computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

WINDOW_S = 10.0
"""What happened so long ago counts for a third of what happens now."""


class BusyMeter:
    """The share of the recent past that was spent in engine calls: an average that fades exponentially.

    One thread tells it of calls; any thread may read.

    Args:
        monotonic: seconds of a clock that never goes back.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, *, window_s: float = WINDOW_S
    ) -> None:
        self._monotonic = monotonic
        self._window_s = window_s
        # Replaced as a whole, so that a reader on another thread never sees halves.
        self._state = (0.0, monotonic(), False)

    def begin(self) -> None:
        """A call begins."""
        self._advance(is_busy=True)

    def end(self) -> None:
        """The call has ended."""
        self._advance(is_busy=False)

    @property
    def share(self) -> float:
        """Of the last ``window_s``, in 0..1; the call in progress included."""
        return self._share_at(self._monotonic())

    @property
    def call_s(self) -> float:
        """How long the call in progress has lasted; 0 without one."""
        _, since_s, is_busy = self._state
        return self._monotonic() - since_s if is_busy else 0.0

    def _share_at(self, now: float) -> float:
        share, since_s, is_busy = self._state
        kept = math.exp(min(0.0, since_s - now) / self._window_s)
        return share * kept + (1.0 - kept if is_busy else 0.0)

    def _advance(self, *, is_busy: bool) -> None:
        now = self._monotonic()
        self._state = (self._share_at(now), now, is_busy)
