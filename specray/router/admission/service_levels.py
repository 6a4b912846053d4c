"""Service levels under load: who is at risk of missing his own, and who makes room for him.

A request may carry a level: milliseconds to its first token, and per output token after that. While one is at
risk, sessions with room give back what they take of a step, a little more whenever that was not enough: first
their draft tokens, then every second of their steps, then three of four. They get it back in the same order
when nobody has been at risk for a while. Without levels nothing here costs or changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from specray.router.live_session import LiveSession

RISK_SHARE = 0.9
"""Share of a level's time per token from which the level is at risk."""
ROOM_SHARE = 0.7
"""Share of a level's time per token up to which a session has room to give."""
FIRST_TOKEN_SHARE = 0.5
"""Share of a level's time to the first token from which the level is at risk."""
MAX_YIELD = 3
"""Highest degree of yielding: 1 without draft tokens, 2 in every second step, 3 in every fourth."""
RAISE_STEPS = 4
"""Steps with somebody at risk after which the others yield by one degree more."""
LOWER_STEPS = 32
"""Steps without anybody at risk after which they yield by one degree less."""


class ServiceLevels:
    """Watches the levels of the running sessions."""

    def __init__(
        self, running: Mapping[str, LiveSession], *, on_change: Callable[[int], None] = lambda degree: None
    ) -> None:
        self._running = running
        self._on_change = on_change
        self._num_steps = 0
        """Steps in a row that were the same: with somebody at risk, or without."""
        self._is_at_risk = False
        self._owes_first_token = False
        """A prompt's first token is at risk."""
        self.degree = 0
        """Degree to which sessions with room yield, in 0..MAX_YIELD."""

    def begin_step(self, now: float) -> None:
        """Looks who is at risk, once for each step of the target."""
        before = self.degree
        at_risk = [live for live in self._running.values() if is_at_risk_now(live, now)]
        self._owes_first_token = any(live.first_token_due_s is not None for live in at_risk)
        self._look(bool(at_risk))
        if self.degree != before:
            self._on_change(self.degree)

    def _look(self, is_at_risk: bool) -> None:
        if not is_at_risk and not self.degree:
            self._is_at_risk, self._num_steps = False, 0
            return
        if is_at_risk != self._is_at_risk:
            self._is_at_risk, self._num_steps = is_at_risk, 0
            # Draft tokens are given up at once.
            self.degree = max(self.degree, int(is_at_risk))
        self._num_steps += 1
        if self._num_steps >= (RAISE_STEPS if is_at_risk else LOWER_STEPS):
            self._num_steps = 0
            self.degree = min(self.degree + 1, MAX_YIELD) if is_at_risk else self.degree - 1

    def is_without_draft(self, live: LiveSession) -> bool:
        """The session leaves its draft tokens to others."""
        return self.degree > 0 and has_room(live)

    def taking_part(self, ready: list[LiveSession], step: int) -> list[LiveSession]:
        """The sessions of ``ready`` that take part in a step: never none of them.

        Args:
            step: number of the step.
        """
        if self.degree < 2:
            return ready
        pause = 1 << (self.degree - 1)
        chosen = [
            live
            for live in ready
            if live.is_prefilling or not has_room(live) or step - live.last_step >= pause
        ]
        return chosen or ready

    def first_tokens_first(self, ready: list[LiveSession]) -> list[LiveSession]:
        """Puts prompts with a level in front, the most pressing first; the rest keep their order."""
        if not any(live.first_token_due_s is not None for live in ready):
            return ready
        return sorted(ready, key=_first_token_due_s)

    @property
    def spares_steps(self) -> bool:
        """Prompts take as little of a step as they can, unless one of them is what is at risk."""
        return self.degree > 0 and not self._owes_first_token


def is_at_risk_now(live: LiveSession, now: float) -> bool:
    """The session will miss its level if it goes on like this."""
    level = live.session.request.level
    if level is None:
        return False
    due_s = live.first_token_due_s
    if due_s is not None:
        assert level.ttft_ms is not None
        return now >= due_s - (1 - FIRST_TOKEN_SHARE) * level.ttft_ms / 1e3
    return level.itl_ms is not None and (live.pace_s or 0.0) > RISK_SHARE * level.itl_ms / 1e3


def has_room(live: LiveSession) -> bool:
    """Others may have what the session takes of a step."""
    level = live.session.request.level
    if level is None or level.itl_ms is None:
        return True
    return live.pace_s is not None and live.pace_s <= ROOM_SHARE * level.itl_ms / 1e3


def attained(live: LiveSession) -> Iterable[tuple[str, bool]]:
    """What became of the levels of a session that has ended, as (kind, it was kept)."""
    level = live.session.request.level
    if level is None:
        return
    if level.ttft_ms is not None:
        first_s = live.first_token_s
        yield "ttft", first_s is not None and first_s - live.arrived_s <= level.ttft_ms / 1e3
    num_later = live.session.num_output_tokens - live.num_first_tokens
    began_s, ended_s = live.first_token_s, live.committed_s
    if level.itl_ms is not None and began_s is not None and ended_s is not None and num_later > 0:
        yield "itl", ended_s - began_s <= num_later * level.itl_ms / 1e3


def _first_token_due_s(live: LiveSession) -> float:
    due_s = live.first_token_due_s
    return float("inf") if due_s is None else due_s
