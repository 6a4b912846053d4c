"""When speculation that is off is tried again, so that what has changed since is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PROBE_INTERVAL_ROUNDS = 256
PROBE_ROUNDS = 2
"""With speculation off, so many rounds in each interval try it again: half a percent where it costs half. Of
several sessions one tries for all: they all wait for its draft, which must read the whole text first."""
MAX_PROBE_SHARE = 0.005
"""Of the time, at most, for what the draft must read before such a try."""


@dataclass(slots=True)
class Probes:
    """The tries of all sessions under one policy.

    Args:
        has_draft: drafts come from an engine, for which rounds wait.
    """

    has_draft: bool
    _rounds_unused: int = 0
    """Of all sessions, since one had draft tokens under a plan of its own."""
    _rounds_untried: int = 0
    """Of all sessions, since one began to try."""

    def add(self, *, is_used: bool) -> None:
        """One round of a session; ``is_used``: with draft tokens, and not as a try."""
        self._rounds_untried += 1
        self._rounds_unused = 0 if is_used else self._rounds_unused + 1

    def begin(self) -> None:
        """A session tries."""
        self._rounds_untried = 0

    def is_due(self, rounds_off: int, *, num_running: int, num_reading_steps: Callable[[], float]) -> bool:
        """A session without speculation should try it again.

        Args:
            rounds_off: of this session, since it had draft tokens.
            num_running: sessions that share the steps.
            num_reading_steps: target steps in the time in which the draft reads what it was not told of it;
                asked only where that decides.
        """
        if not self.has_draft or self._rounds_unused < num_running:
            # Nobody waits for its drafts, or all wait for the draft anyway.
            return rounds_off >= PROBE_INTERVAL_ROUNDS
        num_rounds = min(self._rounds_unused, self._rounds_untried)
        if num_rounds < PROBE_INTERVAL_ROUNDS * num_running:
            return False
        return num_rounds >= round(num_reading_steps() / MAX_PROBE_SHARE) * num_running
