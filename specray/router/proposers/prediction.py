"""Predicted output as a proposer: the text that a request expects, where its output follows it.

A request's prediction goes before its draft model and its n-grams, since it is there at no cost and in long
pieces. How long they are follows from the target's measured times and the prediction's own acceptance, apart
for places that are sure and places that are not. It is verified as tokens chosen without randomness are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specray.config import SpeculationConfig
from specray.control.controller import Controller
from specray.control.goodput import AUTO_K
from specray.control.state import OFF, Plan, SessionStats
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting import PredictionProposer
from specray.requests import GenerateRequest
from specray.router.proposers.base import Budget
from specray.router.session.session import Session
from specray.router.session.values import PREDICTION, Commit
from specray.types import MAX_SPECULATIVE_TOKENS

PRIOR_SURE, PRIOR_UNSURE = 0.97, 0.6
"""Acceptance per token where the place is sure, and where it is not, before any was verified. Of texts that
are edited every 30 to 60 tokens it is about that (the shape of ``specray bench prediction``)."""
LENGTHS: Final = (*AUTO_K, 24, MAX_SPECULATIVE_TOKENS)
"""Numbers of draft tokens that are compared."""
ROUNDS_PER_CHOICE = 8
"""Rounds for which a choice of them holds at most, while as many sessions run; the first holds for one."""


@dataclass(slots=True, eq=False)
class _Track:
    """Proposals of one kind of place: their acceptance, and the length that pays."""

    controller: Controller
    stats: SessionStats
    num_drafts: int = 0
    num_running: int = 0
    """Sessions for which ``num_drafts`` was chosen."""
    num_rounds: int = 0
    """Rounds for which it holds."""
    num_rounds_left: int = 0

    def length(self, num_running: int) -> int:
        """Draft tokens that bring most in a step with so many sessions; 0: none pay."""
        if self.num_rounds_left <= 0 or num_running != self.num_running:
            self.num_rounds = min(ROUNDS_PER_CHOICE, 2 * self.num_rounds or 1)
            self.num_running, self.num_rounds_left = num_running, self.num_rounds
            plans = (OFF, *map(Plan, LENGTHS))
            best = self.controller.best_plan(plans, self.stats, num_running)
            self.num_drafts = best.num_speculative_tokens
        self.num_rounds_left -= 1
        return self.num_drafts


@dataclass(slots=True, eq=False)
class SessionPrediction:
    """Implements ``base.Proposer`` for one session."""

    proposer: PredictionProposer
    sure: _Track
    unsure: _Track
    max_tokens: int
    """Most draft tokens of a proposal."""
    num_prompt_tokens: int
    num_told: int = 0
    """Output tokens that the proposer knows."""
    was_sure: bool = True
    """So was the place of the last proposal."""

    @property
    def source(self) -> str:
        """See Proposer."""
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
        self._tell(session)
        self.was_sure = self.proposer.is_sure
        most = min(self.max_tokens, session.num_remaining - 1)
        if most <= 0 or not self.proposer.knows_place:
            return NO_DRAFT
        length = self._track.length(budget.num_running)
        return DraftTokens(self.proposer.propose(min(length, most)))

    def observe(self, session: Session, commit: Commit) -> None:
        """See Proposer; it follows the output whoever proposed it."""
        if commit.source == PREDICTION and commit.num_draft_tokens:
            track = self._track
            track.controller.observe_round(track.stats, commit.depth, commit.num_accepted_tokens)
            self.proposer.observe(commit.num_accepted_tokens)
        self._tell(session)
        tally, num_matched = session.tally, self.proposer.num_matched
        tally.num_accepted_prediction_tokens = num_matched
        tally.num_rejected_prediction_tokens = self.proposer.num_tokens - num_matched

    @property
    def _track(self) -> _Track:
        return self.sure if self.was_sure else self.unsure

    def _tell(self, session: Session) -> None:
        new = session.committed[self.num_prompt_tokens + self.num_told :]
        self.num_told += len(new)
        self.proposer.extend(new)


class Predictions:
    """Makes the proposers of requests with a prediction.

    Args:
        controller: of the draft model; target times are shared with it.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._sure, self._unsure = (
            controller.beside(PREDICTION, prior_acceptance=prior) for prior in (PRIOR_SURE, PRIOR_UNSURE)
        )

    def configure(self, config: SpeculationConfig) -> None:
        """Makes the next sessions' proposers by other settings."""
        for controller in (self._sure, self._unsure):
            controller.configure(config.without_overlap)

    def of(self, request: GenerateRequest) -> SessionPrediction | None:
        """The proposer of a new session; None: it has no prediction, or does not speculate."""
        prediction, fixed_k = request.speculation.prediction, self._controller.fixed_k(request)
        if not prediction or fixed_k == 0:
            return None
        sure, unsure = (
            _Track(controller, controller.start_session(request, is_auto=True))
            for controller in (self._sure, self._unsure)
        )
        most = fixed_k or MAX_SPECULATIVE_TOKENS
        return SessionPrediction(
            PredictionProposer(prediction), sure, unsure, most, len(request.prompt_token_ids)
        )
