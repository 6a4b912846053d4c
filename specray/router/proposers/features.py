"""The target's own drafter as a proposer: what came with a verdict is verified in the next round.

What it is asked for is planned a round ahead, since it drafts right after the verdict. On the target it takes
no message of its own, and no wait.
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
        """See Proposer; also plans what is asked for with this round, of which one token is left over."""
        plan = self.short.plan(num_remaining=session.num_remaining - 1, num_running=budget.num_running)
        self.following = (
            NOTHING_NEXT
            if plan.is_off
            else NextDraft(plan.num_speculative_tokens, plan.min_acceptance, plan.tree)
        )
        forced = self.propose_forced(session)
        self.is_long = self.is_forced
        if self.is_forced:
            return forced
        return self.given if self.given_len == len(session.committed) else NO_DRAFT

    def observe(self, session: Session, commit: Commit) -> None:
        """Takes what came with a verdict, and learns from it as any local proposer does."""
        LocalProposer.observe(self, session, commit)
        self.given, self.given_len = commit.next_draft, len(session.committed)
