"""The target's own drafter as a proposer: what came with a verdict is verified in the next round.

What it is asked for is planned a round ahead, since it drafts right behind the verdict. On the
target it takes no message of its own, and no wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.router.proposers.base import Budget
from specray.router.proposers.local import LocalProposer
from specray.router.session.session import Session
from specray.router.session.values import NOTHING_NEXT, Commit, NextDraft


@dataclass(slots=True, eq=False)
class FeatureProposer(LocalProposer):
    """One session's view of the target's drafter."""

    given: DraftTokens = NO_DRAFT
    """Draft tokens that came with the last verdict."""
    given_len: int = 0
    """Number of committed tokens that they follow."""

    def propose(self, session: Session, budget: Budget) -> DraftTokens:
        """See Proposer; also plans what is asked for with this round."""
        self.following = self._plan(session, budget)
        forced = self.propose_forced(session)
        self.is_long = self.is_forced
        if self.is_forced:
            return forced
        return self.given if self.given_len == len(session.committed) else NO_DRAFT

    def observe(self, session: Session, commit: Commit) -> None:
        """Takes what came with a verdict, and learns from it as any local proposer does."""
        LocalProposer.observe(self, session, commit)
        self.given, self.given_len = commit.next_draft, len(session.committed)

    def _plan(self, session: Session, budget: Budget) -> NextDraft:
        controller, stats = self.short.controller, self.short.stats
        if controller.resting_plan(stats) is not None:
            return NOTHING_NEXT
        plan = controller.plan(stats, num_remaining=session.num_remaining, num_running=budget.num_running)
        if plan.is_off:
            return NOTHING_NEXT
        num_tokens = min(plan.num_speculative_tokens, self.max_tokens)
        return NextDraft(num_tokens, plan.min_acceptance, plan.tree)
