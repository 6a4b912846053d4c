"""The fallback to a local proposer: n-grams or suffixes stand in where the draft model has nothing to offer.

What they find is accounted under ``FALLBACK``, apart from the model's draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from specray.control.controller import Controller
from specray.control.state import Plan
from specray.draft_tokens import DraftTokens
from specray.router.live_session import LiveSession
from specray.router.proposers.base import Budget
from specray.router.proposers.local import LocalProposer


class NgramFallback:
    """Decides where a session's local proposer goes before its draft model."""

    def __init__(self, running: Mapping[str, LiveSession], controller: Controller) -> None:
        self._running = running
        self._controller = controller

    def propose_instead(self, live: LiveSession, plan: Plan, now: float) -> DraftTokens | None:
        """Local draft tokens, to be verified at once, where they promise more than asking the draft.

        With g tokens per second in the long run, a round that commits E tokens in t seconds is worth E - g t.

        Returns:
            None: the draft is to be asked.
        """
        local, num_running = live.local, len(self._running)
        if local is None:
            return None
        draft = local.propose(live.session, Budget(now, num_running))
        if not draft.token_ids:
            return None
        rate = self._controller.rate(plan, live.stats, num_running)
        asked_tokens, asked_s = self._controller.asked(plan, live.stats, num_running)
        tokens, seconds = local.expect(draft, num_running=num_running)
        is_worth_more = tokens - rate * seconds > asked_tokens - rate * asked_s
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
