"""Sessions whose next Verify is held back for the draft, and since when."""

from __future__ import annotations

from collections.abc import Mapping

from specray.router.live_session import LiveSession
from specray.router.settings import Settings

UNMEASURED_PATIENCE_S = 1.5
"""Seconds that a round waits for a draft of which nothing is known yet."""
SERIAL_PATIENCE_S = 1.0
"""Least seconds that a round waits for the draft when both engines take turns."""


def patience_s(measured_s: float | None, settings: Settings, *, is_serial: bool) -> float:
    """Longest seconds that a round waits for the draft, whose measured times allow ``measured_s``."""
    allowed_s = UNMEASURED_PATIENCE_S if measured_s is None else measured_s
    if is_serial:
        # The reference loop goes on without a draft only when something is wrong with it.
        allowed_s = max(allowed_s, SERIAL_PATIENCE_S)
    return min(allowed_s, settings.router.round_timeout_s)


class DraftWaits:
    """Waits for the draft, by session; seconds are on the router's clock.

    Args:
        running: the running sessions, shared with their owner; a wait ends with its session.
    """

    def __init__(self, running: Mapping[str, LiveSession]) -> None:
        self._running = running
        self._since_s: dict[str, float] = {}

    def begin(self, request_id: str, now: float) -> None:
        """The session's next Verify is held back from now on."""
        self._since_s[request_id] = now

    def end(self, live: LiveSession) -> bool:
        """Ends the wait of a session that waits no longer. False: it did not wait, or still does."""
        if live.request_id not in self._since_s or live.session.is_waiting_for_draft:
            return False
        del self._since_s[live.request_id]
        return True

    def clear(self) -> None:
        self._since_s.clear()

    def take_expired(self, now: float, patience_s: float) -> list[LiveSession]:
        """Sessions that have waited for ``patience_s``, whose waits end; forgets waits that are over."""
        expired: list[LiveSession] = []
        for request_id, since_s in list(self._since_s.items()):
            live = self._running.get(request_id)
            is_waiting = live is not None and live.session.is_waiting_for_draft
            # Deadlines are compared as sums, as the alarm is set: a difference can round to just below.
            if is_waiting and now < since_s + patience_s:
                continue
            del self._since_s[request_id]
            if live is not None and is_waiting:
                expired.append(live)
        return expired

    @property
    def oldest_s(self) -> float | None:
        """Time since when the session that waits longest has waited; None: nobody waits."""
        return min(self._since_s.values(), default=None)
