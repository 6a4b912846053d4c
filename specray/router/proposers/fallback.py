"""The n-gram fallback: draft tokens of a session's local draft where the draft model is not asked."""

from __future__ import annotations

from collections.abc import Mapping

from specray.control.controller import Controller
from specray.control.goodput import MAX_ACCEPTANCE, expected_tokens
from specray.control.state import Plan
from specray.router.proposers.ngram import LocalDraft
from specray.router.session_record import LiveSession
from specray.types import DraftTokens, Overlap


class NgramFallback:
    """Local draft tokens of all running sessions.

    Args:
        running: the sessions, shared with their owner.
        controller: of the draft model, which the fallback is compared with.
    """

    def __init__(self, running: Mapping[str, LiveSession], controller: Controller) -> None:
        self._running = running
        self._controller = controller

    def draft(self, live: LiveSession, local: LocalDraft) -> DraftTokens:
        """What needs no draft model: a round without the model need not be one without draft tokens."""
        return local.draft(live.session, num_running=len(self._running))

    def replace(self, live: LiveSession, plan: Plan) -> DraftTokens | None:
        """Draft tokens to be verified at once, where that promises more than asking the draft.

        With g tokens per second in the long run, a round that commits E tokens in t seconds is worth E - g t.
        Where both engines take turns anyway, only after a long match: short ones are rarely worth more.

        Returns:
            None: the draft is to be asked.
        """
        if live.local is None:
            return None
        repetition = self.draft(live, live.local)
        if not repetition.token_ids or (plan.overlap is Overlap.SERIAL and not live.local.is_long):
            return None
        num_running, k = len(self._running), plan.num_speculative_tokens
        rate = self._controller.goodput(plan, live.stats, num_running)
        asked_rate = self._controller.goodput(Plan(k), live.stats, num_running)
        asked_tokens = expected_tokens(min(live.stats.acceptance.value, MAX_ACCEPTANCE), k)
        tokens, seconds = live.local.expect(len(repetition.token_ids), num_running=num_running)
        is_worth_more = tokens - rate * seconds > asked_tokens * (1 - rate / asked_rate)
        return repetition if is_worth_more else None

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
        repetition = self.draft(live, live.local)
        agrees = live.local.is_long and repetition.token_ids[:num_foreseen] == foreseen.token_ids
        if agrees and self._brings_more(live, live.local, len(repetition.token_ids), num_foreseen):
            return repetition
        live.local.pass_over()
        return None

    def _brings_more(self, live: LiveSession, local: LocalDraft, num_drafts: int, num_fewer: int) -> bool:
        """A round of so many draft tokens of its local draft brings more than of fewer, for its time."""
        num_running = len(self._running)
        tokens, seconds = local.expect(num_drafts, num_running=num_running)
        fewer_tokens, shorter_s = local.expect(num_fewer, num_running=num_running)
        rate = self._controller.goodput(live.ahead, live.stats, num_running)
        return tokens - fewer_tokens > rate * (seconds - shorter_s)
