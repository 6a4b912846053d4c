"""The prefill of the draft: how many unread tokens it computes at once, and of which sessions.

Everything else that the draft was asked waits meanwhile. So the tokens of the last rounds go with a round's
question, and more than those in prefill chunks, which are sent while the target works: few enough tokens at
once, for all sessions together, that sessions which are drafted for keep their pace; the first comer's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specray.router.draft_model.budgets import MIN_DRAFT_PREFILL_TOKENS, Budgets
from specray.router.live_session import LiveSession

PATIENCE_SHARE = 0.5
"""Share of the time for which a round waits for the draft that prefill for others may take."""
PROMPTS_FIRST_SHARE = 0.25
"""Share of the running sessions whose prompts go first.

Measured on 2 cores, tokens/s of 16 and 32 requests that arrive at once, single runs: 338 and 358 without this
rule, 353 and 367 with it; with n-gram drafts left out next to prompts too, 361 and 358 at a half, and 385 and
391 at this share (``bench compare --arm specray:serial``)."""


class DraftPrefill:
    """Shares out the tokens that the draft prefills at once.

    Args:
        max_tokens: tokens at once now, also while nobody waits for the draft.
    """

    def __init__(
        self,
        running: Mapping[str, LiveSession],
        budgets: Budgets,
        *,
        max_tokens: Callable[[], int],
        patience_s: Callable[[], float],
        is_draft_idle: Callable[[], bool],
    ) -> None:
        self._running = running
        self._budgets = budgets
        self._max_tokens = max_tokens
        self._patience_s = patience_s
        self._is_draft_idle = is_draft_idle
        self._left: int | None = None
        """Tokens left for the message in the making; None: not counted yet."""
        self._has_company = False
        """True: sessions wait for the draft while it prefills for others."""
        self._step = 0
        self._num_given = 0
        """Tokens given in this step of the target."""
        self._oldest_s: float | None = None
        """Time before which no chunk without an answer was given; None: there is none."""

    @property
    def is_going_on(self) -> bool:
        """The draft has chunks to prefill."""
        return self._oldest_s is not None and any(
            live.session.draft.is_prefilling for live in self._running.values()
        )

    def note(self, live: LiveSession, now: float) -> None:
        """Remembers that a chunk of the session is on its way."""
        live.prefill_since_s = now
        if self._oldest_s is None:
            self._oldest_s = now

    def expire(self, now: float, timeout_s: float) -> None:
        """Begins anew where an answer was lost: the draft has answered others since, or would be given up."""
        # Asked at every look into the inbox; none that is outstanding is older than this.
        if self._oldest_s is None or now < self._oldest_s + timeout_s:
            return
        since: list[float] = []
        for live in self._running.values():
            since_s = live.prefill_since_s
            if since_s is None or not live.session.draft.is_prefilling:
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
        """The draft must prefill something before the next question: the prompt, or many later tokens."""
        return live.session.draft.in_flight is None and not _is_caught_up(live)

    def share(self, live: LiveSession) -> int:
        """Number of unread tokens that the next chunk may hold; 0: others have all the room."""
        left, wanted = self._num_left(), live.num_unread
        # A few tokens take as long as some more do.
        if left < min(wanted, MIN_DRAFT_PREFILL_TOKENS, self._max_tokens()):
            return 0
        share = min(left, wanted)
        self._left = left - share
        self._num_given += share
        return share

    def can_ask(self, live: LiveSession) -> bool:
        """A question may bring all unread tokens. With company only few: all wait for them."""
        if live.session.draft.is_prefilling:
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
            room = self._room_beside(company) if self._has_company else self._max_tokens()
            # An engine takes what several messages have brought together.
            taken = sum(map(_num_being_prefilled, self._running.values()))
            self._left = max(0, room - (max(taken, self._num_given) if self._has_company else taken))
        return self._left

    def _room_beside(self, company: list[LiveSession]) -> int:
        return self._budgets.draft_prefill_tokens(
            self._max_tokens(),
            num_rows=sum(live.num_rows for live in company),
            num_running=len(company),
            most_s=PATIENCE_SHARE * self._patience_s(),
        )


def _is_caught_up(live: LiveSession) -> bool:
    """All unread tokens are of the last rounds."""
    has_read_prompt = live.session.draft.synced_len >= live.session.num_prompt_tokens
    return has_read_prompt and live.num_unread <= MIN_DRAFT_PREFILL_TOKENS


def _is_drafted_for(live: LiveSession) -> bool:
    stats = live.stats
    if live.is_drafted_locally or stats.rest_rounds > 0 or stats.plan is None or stats.plan.is_off:
        return False
    return not live.is_prefilling and _is_caught_up(live)


def _num_being_prefilled(live: LiveSession) -> int:
    item = live.session.draft.in_flight
    if item is None:
        return 0
    is_question = item.base_len > 0 and not item.is_prefill_chunk
    return 0 if is_question and len(item.token_ids) <= MIN_DRAFT_PREFILL_TOKENS else len(item.token_ids)


def are_prompts_first(running: Mapping[str, LiveSession]) -> bool:
    """Several sessions, and a good part of all, wait for the target to prefill their prompts.

    Steps are full of prompts then and cost by the row: a row of a draft token that is rejected would have
    been one of a prompt. And the fewer such steps there are, the sooner all go on.
    """
    num_prefilling = sum(live.is_prefilling for live in running.values())
    return num_prefilling > 1 and num_prefilling > PROMPTS_FIRST_SHARE * len(running)
