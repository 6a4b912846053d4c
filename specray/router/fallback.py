"""The fallback to a local proposer: n-grams or suffixes stand in where the draft model has nothing to offer.

What they find is accounted under ``FALLBACK``, apart from the model's draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from specray.control.controller import Controller
from specray.control.expectations import expected_tokens
from specray.control.goodput import MAX_ACCEPTANCE
from specray.control.state import Plan
from specray.draft_tokens import DraftTokens
from specray.router.live_session import LiveSession
from specray.router.proposers.base import Budget
from specray.router.proposers.local import LocalProposer
from specray.types import Overlap


class NgramFallback:
    """Decides where a session's local proposer goes before its draft model."""

    def __init__(self, running: Mapping[str, LiveSession], controller: Controller) -> None:
        self._running = running
        self._controller = controller

    def propose_instead(self, live: LiveSession, plan: Plan, now: float) -> DraftTokens | None:
        """Local draft tokens, to be verified at once, where they promise more than asking the draft.

        With g tokens per second in the long run, a round that commits E tokens in t seconds is worth E - g t.
        Where both engines take turns anyway, only after a long match: short ones are rarely worth more.

        Returns:
            None: the draft is to be asked.
        """
        local, num_running, k = live.local, len(self._running), plan.num_speculative_tokens
        if local is None:
            return None
        draft = local.propose(live.session, Budget(now, num_running))
        if not draft.token_ids or (plan.overlap is Overlap.SERIAL and not local.is_long):
            return None
        rate = self._controller.goodput(plan, live.stats, num_running)
        asked_rate = self._controller.goodput(Plan(k), live.stats, num_running)
        asked_tokens = expected_tokens(min(live.stats.acceptance.value, MAX_ACCEPTANCE), k)
        tokens, seconds = local.expect(draft, num_running=num_running)
        is_worth_more = tokens - rate * seconds > asked_tokens * (1 - rate / asked_rate)
        return draft if is_worth_more else None

    def extend(self, live: LiveSession, foreseen: DraftTokens, now: float) -> DraftTokens | None:
        """A long repetition that begins with the draft tokens of a hit and goes on, where that brings more.

        Not by rejection: the choice looks at what the draft drew, which then would be no free draw any more.

        Returns:
            None: what was foreseen is verified.
        """
        sampling, num_foreseen = live.session.request.sampling, len(foreseen)
        local = live.local
        if local is None or live.ahead.is_off or sampling.draws_by_rejection:
            return None
        if local.max_tokens <= num_foreseen:
            # With a fixed K nothing could be longer: no reason to look.
            return None
        longer = local.propose(live.session, Budget(now, len(self._running)))
        agrees = local.is_long and longer.first_chain().token_ids[:num_foreseen] == foreseen.token_ids
        if agrees and self._brings_more(live, local, longer, foreseen):
            return longer
        local.pass_over()
        return None

    def _brings_more(
        self, live: LiveSession, local: LocalProposer, longer: DraftTokens, foreseen: DraftTokens
    ) -> bool:
        """A round with the local draft tokens brings more than one with those of the hit, for its time."""
        num_running = len(self._running)
        tokens, seconds = local.expect(longer, num_running=num_running)
        fewer_tokens, shorter_s = local.expect(foreseen, num_running=num_running)
        rate = self._controller.goodput(live.ahead, live.stats, num_running)
        return tokens - fewer_tokens > rate * (seconds - shorter_s)
