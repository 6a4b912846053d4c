"""What a session does until the next review, and the record that the policy keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specray.router.estimates import Rate
from specray.types import Overlap

FIRST_REVIEW_ROUNDS = 4
REVIEW_ROUNDS = 16
"""A plan stands for so many rounds; the first ones for fewer, each twice as long as the one before."""


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
class Pacing:
    """One session's part in the policy."""

    acceptance: Rate
    """Per draft token."""
    continuation: Rate
    """Per draft token, given that there is one: that the draft was sure enough to go on."""
    request_id: str = ""
    fixed_k: int | None = None
    """What configuration or request say; None: chosen by measurement."""
    plan: Plan | None = None
    rounds_to_review: int = 0
    review_rounds: int = FIRST_REVIEW_ROUNDS
    rounds_off: int = 0
    is_probing: bool = False
    rest_rounds: int = 0
    """Rounds without draft after the draft refused the session."""
