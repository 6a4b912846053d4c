"""Predicted output as a proposer: the text that a request expects, where its output follows it.

A request's prediction goes before its draft model and its n-grams, since it is there at no cost and in long
pieces. How long they are follows from the target's measured times and the prediction's own acceptance, apart
for places that are sure and places that are not. It is verified as tokens chosen without randomness are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specray.control.draft_length import SessionLength
from specray.control.goodput import AUTO_K
from specray.control.state import OFF, Plan
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting import PredictionProposer
from specray.router.proposers.base import Budget
from specray.router.session.session import Session
from specray.router.session.values import PREDICTION, Commit
from specray.types import MAX_SPECULATIVE_TOKENS

LENGTHS: Final = (*AUTO_K, 24, MAX_SPECULATIVE_TOKENS)
"""Numbers of draft tokens that are compared."""
ROUNDS_PER_CHOICE = 8
"""Rounds for which a choice of them holds at most, while as many sessions run; the first holds for one."""


@dataclass(slots=True, eq=False)
class PlaceLength:
    """Proposals of one kind of place: their acceptance, and the length that pays."""

    length: SessionLength
    num_drafts: int = 0
    num_running: int = 0
    """Sessions for which ``num_drafts`` was chosen."""
    num_rounds: int = 0
    """Rounds for which it holds."""
    num_rounds_left: int = 0

    def choose(self, num_running: int) -> int:
        """Draft tokens that bring most in a step of ``num_running`` sessions; 0: none pay."""
        if self.num_rounds_left <= 0 or num_running != self.num_running:
            self.num_rounds = min(ROUNDS_PER_CHOICE, 2 * self.num_rounds or 1)
            self.num_running, self.num_rounds_left = num_running, self.num_rounds
            plans = (OFF, *map(Plan, LENGTHS))
            best = self.length.length.best_plan(plans, self.length.stats, num_running)
            self.num_drafts = min(best.num_speculative_tokens, self.length.stats.max_k)
        self.num_rounds_left -= 1
        return self.num_drafts


@dataclass(slots=True, eq=False)
class SessionPrediction:
    """Implements ``base.Proposer`` for one session."""

    proposer: PredictionProposer
    sure: PlaceLength
    unsure: PlaceLength
    num_prompt_tokens: int
    num_known: int = 0
    """Output tokens that the proposer knows."""
    was_sure: bool = True
    """Last place was sure."""

    @property
    def source(self) -> str:
        return PREDICTION

    @property
    def is_followed(self) -> bool:
        """The output follows the prediction: nothing else need be asked."""
        return self.proposer.is_sure

    @property
    def may_propose_next(self) -> bool:
        """A round without draft tokens may be followed by one with some of the prediction."""
        return self.proposer.may_know_next

    def propose(self, session: Session, budget: Budget) -> DraftTokens:
        """See Proposer; none where the place in the prediction is not known, or it would not pay."""
        self._extend(session)
        self.was_sure = self.proposer.is_sure
        most = session.num_remaining - 1
        if most <= 0 or not self.proposer.knows_place:
            return NO_DRAFT
        return DraftTokens(self.proposer.propose(min(self._place.choose(budget.num_running), most)))

    def observe(self, session: Session, commit: Commit) -> None:
        """See Proposer; it follows the output whoever proposed it."""
        if commit.source == PREDICTION and commit.num_draft_tokens:
            self._place.length.observe(commit.depth, commit.num_accepted_tokens)
            self.proposer.observe(commit.num_accepted_tokens)
        self._extend(session)
        tally, num_matched = session.tally, self.proposer.num_matched
        tally.num_accepted_prediction_tokens = num_matched
        tally.num_rejected_prediction_tokens = self.proposer.num_tokens - num_matched

    @property
    def _place(self) -> PlaceLength:
        return self.sure if self.was_sure else self.unsure

    def _extend(self, session: Session) -> None:
        new = session.committed[self.num_prompt_tokens + self.num_known :]
        self.num_known += len(new)
        self.proposer.extend(new)
