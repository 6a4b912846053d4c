"""What a session verifies without asking a draft model: what its local draft finds, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from specray.control.controller import Policy
from specray.control.expected import expected_tokens
from specray.control.prospects import MAX_ACCEPTANCE
from specray.control.state import Plan
from specray.router.proposers.ngram import LocalDraft
from specray.router.session_record import LiveSession
from specray.types import DraftTokens, Overlap


class Fillers:
    """Local draft tokens of all running sessions.

    Args:
        running: the sessions, shared with their owner.
        policy: of the draft model, which fillers are compared with.
    """

    def __init__(self, running: Mapping[str, LiveSession], policy: Policy) -> None:
        self._running = running
        self._policy = policy

    def draft(self, live: LiveSession, local: LocalDraft) -> DraftTokens:
        """What needs no draft model: a round without the model need not be one without draft tokens."""
        return local.draft(live.session, num_running=len(self._running))

    def fill_in(self, live: LiveSession, plan: Plan) -> DraftTokens | None:
        """A filler, to be verified at once, where that promises more than asking the draft.

        With g tokens per second in the long run, a round that commits E tokens in t seconds is worth E - g t.
        Where both engines take turns anyway, only after a long match: short ones are rarely worth more.

        Returns:
            None: the draft is to be asked.
        """
        if live.local is None:
            return None
        filler = self.draft(live, live.local)
        if not filler.token_ids or (plan.overlap is Overlap.SERIAL and not live.local.is_long):
            return None
        num_running, k = len(self._running), plan.num_speculative_tokens
        rate = self._policy.goodput(plan, live.pacing, num_running)
        asked_rate = self._policy.goodput(Plan(k), live.pacing, num_running)
        asked_tokens = expected_tokens(min(live.pacing.acceptance.value, MAX_ACCEPTANCE), k)
        tokens, seconds = live.local.expect(len(filler.token_ids), num_running=num_running)
        is_worth_more = tokens - rate * seconds > asked_tokens * (1 - rate / asked_rate)
        return filler if is_worth_more else None

    def extend(self, live: LiveSession, foreseen: DraftTokens) -> DraftTokens | None:
        """A long repetition that begins with what was foreseen and goes on, where that brings more.

        Not by rejection: the choice looks at what the draft drew, which then would be no free draw any more.

        Returns:
            None: what was foreseen is verified.
        """
        sampling, num_foreseen = live.session.request.sampling, len(foreseen.token_ids)
        if live.local is None or live.ahead.is_off or sampling.draws_by_rejection:
            return None
        if live.local.max_tokens <= num_foreseen:
            # With a fixed K nothing could be longer: no reason to look.
            return None
        filler = self.draft(live, live.local)
        agrees = live.local.is_long and filler.token_ids[:num_foreseen] == foreseen.token_ids
        if agrees and self._brings_more(live, live.local, len(filler.token_ids), num_foreseen):
            return filler
        live.local.pass_over()
        return None

    def _brings_more(self, live: LiveSession, local: LocalDraft, num_drafts: int, num_fewer: int) -> bool:
        """A round of so many draft tokens of its local draft brings more than of fewer, for its time."""
        num_running = len(self._running)
        tokens, seconds = local.expect(num_drafts, num_running=num_running)
        fewer_tokens, shorter_s = local.expect(num_fewer, num_running=num_running)
        rate = self._policy.goodput(live.ahead, live.pacing, num_running)
        return tokens - fewer_tokens > rate * (seconds - shorter_s)
