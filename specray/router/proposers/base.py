"""The seam between a session's rounds and whatever proposes draft tokens for them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from specray.control.state import Plan
from specray.draft_tokens import DraftTokens
from specray.router.session.session import Session
from specray.router.session.values import Commit


class Pending(enum.Enum):
    """The type of ``PENDING``."""

    PENDING = enum.auto()


PENDING: Final = Pending.PENDING
"""The proposer was asked and answers later, through the session."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a round of one session may spend on draft tokens."""

    now: float
    """Seconds on the router's clock."""
    num_running: int
    """Number of sessions that share the target's steps."""
    plan: Plan | None = None
    """Number of draft tokens and overlap of the round; None: the proposer plans itself."""


class Proposer(Protocol):
    """Proposes draft tokens for sessions, and learns from the verdicts on them."""

    @property
    def source(self) -> str:
        """Name under which its draft tokens are accounted: a DraftKind's value, or one of those in
        ``session.values``."""
        ...

    def propose(self, session: Session, budget: Budget) -> DraftTokens | Literal[Pending.PENDING] | None:
        """Draft tokens to verify after all committed tokens.

        Returns:
            Draft tokens, none where it looked in vain; PENDING: they come later; None: it has not looked.
        """
        ...

    def observe(self, session: Session, commit: Commit) -> None:
        """Learns from a verdict; ``commit.source`` names the proposer of the draft tokens, maybe another."""
        ...
