"""What a session verifies without asking a draft model: what its local draft finds, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from specray.router.expected import expected_tokens
from specray.router.live import LiveSession
from specray.router.plan import Plan
from specray.router.policy import Policy
from specray.router.prospects import MAX_ACCEPTANCE
from specray.router.records import NOTHING_DRAFTED, Drafted
from specray.types import Overlap


class Fillers:
    """Local draft tokens of all running sessions.

    Args:
        running: the sessions, shared with their owner.
        policy: of the draft model, which fillers are compared with.
    """

    def __init__(self, running: Mapping[str, LiveSession], policy: Policy) -> None:
        self._running = running
        self._policy = policy

    def draft(self, live: LiveSession) -> Drafted:
        """What needs no draft model: a round without the model need not be one without draft tokens."""
        if live.local is None:
            return NOTHING_DRAFTED
        return live.local.draft(live.session, num_running=len(self._running))

    def fill_in(self, live: LiveSession, plan: Plan) -> Drafted | None:
        """A filler, to be verified at once, where that promises more than asking the draft.

        With g tokens per second in the long run, a round that commits E tokens in t seconds is worth E - g t.
        Where both engines take turns anyway, only after a long match: short ones are rarely worth more.

        Returns:
            None: the draft is to be asked.
        """
        if live.local is None:
            return None
        filler = self.draft(live)
        if not filler.token_ids or (plan.overlap is Overlap.SERIAL and not live.local.is_long):
            return None
        num_running, k = len(self._running), plan.num_speculative_tokens
        rate = self._policy.goodput(plan, live.pacing, num_running)
        asked_rate = self._policy.goodput(Plan(k), live.pacing, num_running)
        asked_tokens = expected_tokens(min(live.pacing.acceptance.value, MAX_ACCEPTANCE), k)
        tokens, seconds = live.local.expect(len(filler.token_ids), num_running=num_running)
        is_worth_more = tokens - rate * seconds > asked_tokens * (1 - rate / asked_rate)
        return filler if is_worth_more else None
