"""What a session does until the next review, and the record that the policy keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specray.control.estimators import Rate
from specray.types import Overlap

FIRST_REVIEW_ROUNDS = 4
REVIEW_ROUNDS = 16
"""A plan stands for so many rounds; the first ones for fewer, each twice as long as the one before."""
OFF_REVIEW_ROUNDS = 32
"""As REVIEW_ROUNDS, without speculation: nothing is learnt meanwhile, and a small target's step is short."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a session does until the next review."""

    num_speculative_tokens: int
    overlap: Overlap = Overlap.SERIAL
    width: int = 1
    """Under enumeration: branches for each number of accepted tokens, on average; the draft chooses which."""
    min_acceptance: float = field(default=0.0, compare=False)
    """A proposal ends where the draft believes less than this of the acceptance of all of it."""

    @property
    def is_off(self) -> bool:
        return self.num_speculative_tokens == 0

    @property
    def way(self) -> str:
        """``off``, or the overlap."""
        return "off" if self.is_off else self.overlap.value


OFF = Plan(0)


@dataclass(slots=True)
class Judged:
    """What proposals come to that may have any length and end where the draft is too unsure of them.

    Measured as they are: the texts in which a draft is sure for long are those in which it is right, so
    rates per token say too little of them.
    """

    num_drafts: Rate
    """Per proposal."""
    num_accepted: Rate
    """Per proposal."""

    def start(self, weight: float) -> Judged:
        """Of a new session, which knows what this has come to so far."""
        return Judged(Rate(self.num_drafts.value, weight), Rate(self.num_accepted.value, weight))

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One verdict."""
        self.num_drafts.add(num_drafts, 1)
        self.num_accepted.add(num_accepted, 1)

    def relax(self, share: float) -> None:
        """Forgets a share of the verdicts."""
        self.num_drafts.relax(share)
        self.num_accepted.relax(share)


@dataclass(slots=True)
class Pacing:
    """One session's part in the policy."""

    acceptance: Rate
    """Per draft token."""
    continuation: Rate
    """Per draft token, given that there is one: that the draft was sure enough to go on."""
    judged: Judged
    request_id: str = ""
    fixed_k: int | None = None
    """What configuration or request say; None: chosen by measurement."""
    draft_is_judge: bool = True
    """The draft can say of a draft token how likely it is accepted; not of one drawn for rejection."""
    plan: Plan | None = None
    num_remaining: int = 0
    """Output tokens that may still come, when its plan was asked for last."""
    num_unread: int = 0
    """Tokens that the draft had not been told then: it must read them before its next proposal."""
    num_asked: int = 0
    """Most draft tokens of the proposal that is verified next, where it has a bound; else 0."""
    rounds_to_review: int = 0
    review_rounds: int = FIRST_REVIEW_ROUNDS
    rounds_off: int = 0
    is_probing: bool = False
    num_turns: int = 0
    """Of the decision of all, at its last review."""
    rest_rounds: int = 0
    """Rounds without draft after the draft refused the session."""
