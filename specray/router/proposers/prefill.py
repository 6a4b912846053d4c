"""How much of what it was not told the draft is given to read at once, and by whom.

Everything else that the draft was asked waits meanwhile. So what a round brings goes with the round's
question, and more than that in pieces, which are given while the target works: few enough tokens at once for
all sessions together that those which are drafted for keep their pace, and the first comer's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specray.router.proposers.budgets import MIN_DRAFT_PREFILL_TOKENS, Budgets
from specray.router.session_record import LiveSession

PATIENCE_SHARE = 0.5
"""Of the time for which a round waits for the draft, what it may take to read for others."""


class Reading:
    """Shares out the tokens that the draft reads at once.

    Args:
        running: the sessions, in the order of their arrival; shared with their owner.
        budgets: know how much is read in the time of a target step.
        most_tokens: at once, also while nobody waits for the draft.
        patience_s: how long a round waits for the draft.
        is_draft_idle: nobody is asked to draft for now, whoever could be.
    """

    def __init__(
        self,
        running: Mapping[str, LiveSession],
        budgets: Budgets,
        *,
        most_tokens: int,
        patience_s: Callable[[], float],
        is_draft_idle: Callable[[], bool],
    ) -> None:
        self._running = running
        self._budgets = budgets
        self._most_tokens = most_tokens
        self._patience_s = patience_s
        self._is_draft_idle = is_draft_idle
        self._left: int | None = None
        """Tokens of the message in the making; None: not counted yet."""
        self._has_company = False
        """Sessions wait for the draft while it reads."""
        self._step = 0
        self._num_given = 0
        """Tokens, in this step of the target."""
        self._oldest_s: float | None = None
        """No piece without an answer was given before; None: none at all."""

    @property
    def is_going_on(self) -> bool:
        """The draft has pieces to read."""
        return self._oldest_s is not None and any(
            live.session.draft.is_reading for live in self._running.values()
        )

    def note(self, live: LiveSession, now: float) -> None:
        """A piece for the session is on its way."""
        live.reading_since_s = now
        if self._oldest_s is None:
            self._oldest_s = now

    def expire(self, now: float, timeout_s: float) -> None:
        """Begins anew where an answer was lost: the draft has answered others since, or would be given up."""
        # Asked at every look into the inbox; none that is outstanding is older than this.
        if self._oldest_s is None or now < self._oldest_s + timeout_s:
            return
        since: list[float] = []
        for live in self._running.values():
            since_s = live.reading_since_s
            if since_s is None or not live.session.draft.is_reading:
                continue
            if now >= since_s + timeout_s:
                live.session.lose_draft()
            else:
                since.append(since_s)
        self._oldest_s = min(since, default=None)

    def begin(self) -> None:
        """Begins a message, before any of its items is made."""
        self._left = None

    def begin_step(self, number: int) -> None:
        """The target's step of that number is being made or under way: with company, each has its share."""
        if number != self._step:
            self._step, self._num_given = number, 0

    def is_due(self, live: LiveSession) -> bool:
        """Something is to be read before the next question: its prompt, or what followed since a while."""
        return live.session.draft.in_flight is None and not _is_caught_up(live)

    def share(self, live: LiveSession) -> int:
        """Of the unread tokens, those that the next item may bring; 0: others have them all."""
        left, wanted = self._num_left(), live.num_unread
        # A few tokens take as long as some more do.
        if left < min(wanted, MIN_DRAFT_PREFILL_TOKENS, self._most_tokens):
            return 0
        share = min(left, wanted)
        self._left = left - share
        self._num_given += share
        return share

    def can_ask(self, live: LiveSession) -> bool:
        """A question may bring all that is unread. With company only little: all wait for it."""
        if live.session.draft.is_reading:
            return False
        num_unread = live.num_unread
        if _is_caught_up(live):
            return True
        left = self._num_left()
        if num_unread > (min(left, MIN_DRAFT_PREFILL_TOKENS) if self._has_company else left):
            return False
        self._left = left - num_unread
        return True

    def _num_left(self) -> int:
        if self._left is None:
            company = [live for live in self._running.values() if _is_drafted_for(live)]
            self._has_company = bool(company) and not self._is_draft_idle()
            room = self._room_beside(company) if self._has_company else self._most_tokens
            # An engine takes what several messages have brought together.
            taken = sum(map(_num_being_read, self._running.values()))
            self._left = max(0, room - (max(taken, self._num_given) if self._has_company else taken))
        return self._left

    def _room_beside(self, company: list[LiveSession]) -> int:
        return self._budgets.draft_prefill_tokens(
            self._most_tokens,
            num_rows=sum(live.num_rows for live in company),
            num_running=len(company),
            most_s=PATIENCE_SHARE * self._patience_s(),
        )


def _is_caught_up(live: LiveSession) -> bool:
    """What is unread is of the last rounds."""
    has_read_prompt = live.session.draft.synced_len >= live.session.num_prompt_tokens
    return has_read_prompt and live.num_unread <= MIN_DRAFT_PREFILL_TOKENS


def _is_drafted_for(live: LiveSession) -> bool:
    """Its rounds wait for the draft model."""
    stats = live.stats
    if live.is_drafted_locally or stats.rest_rounds > 0 or stats.plan is None or stats.plan.is_off:
        return False
    return not live.is_prefilling and _is_caught_up(live)


def _num_being_read(live: LiveSession) -> int:
    item = live.session.draft.in_flight
    if item is None or (
        item.base_len > 0 and not item.is_piece and len(item.token_ids) <= MIN_DRAFT_PREFILL_TOKENS
    ):
        return 0
    return len(item.token_ids)
