"""What a session verifies next for each verdict that it may get: the branches that its draft has answered.

An outcome is the last draft token that is accepted (its node, -1: none) and the token that the target draws
behind it. For a chain, the number of accepted tokens says as much as the node does; for a tree it does not.
"""

from __future__ import annotations

from typing import NamedTuple

from specray.draft_tokens import DraftTokens

Outcome = tuple[int, int]
"""The last node accepted (-1: none), and the token behind it."""


class Found(NamedTuple):
    """What was known of an outcome."""

    draft: DraftTokens | None
    """Draft tokens to verify next; None: it was not foreseen."""
    is_foreseen: bool
    """There were branches behind the node."""


class Branches:
    """The branches of one round."""

    __slots__ = ("_by_outcome", "_path")

    def __init__(self) -> None:
        self._by_outcome: dict[Outcome, DraftTokens] = {}
        self._path: tuple[int, ...] = (-1,)
        """The last node accepted, by the number of accepted tokens, of the outcomes that were asked for."""

    def ask(self, verifying: DraftTokens) -> None:
        """The draft is asked for outcomes of what is verified, of a tree for those of its first chain."""
        self._by_outcome.clear()
        self._path = (-1, *verifying.first_path)

    def add(self, num_accepted: int, next_token_id: int, draft: DraftTokens) -> None:
        """Takes a branch as the draft names it; one of more tokens than were asked for is no outcome."""
        if num_accepted < len(self._path):
            self._by_outcome[self._path[num_accepted], next_token_id] = draft

    def add_proposal(self, verifying: DraftTokens, drafted: DraftTokens) -> None:
        """Takes a chain that was proposed beside what is verified: the tokens that both have in common are
        accepted, then comes its next one."""
        common = verifying.common(drafted.token_ids)
        rest = len(verifying.path(common)) + 1
        if len(drafted) > rest:
            draft = DraftTokens(drafted.token_ids[rest:], probs=drafted.probs[rest:])
            self._by_outcome[common, drafted.token_ids[rest - 1]] = draft

    def take(self, outcome: Outcome) -> Found:
        """What follows an outcome; the branches belong to the round that it ends, and are forgotten."""
        found = Found(self._by_outcome.get(outcome), any(node == outcome[0] for node, _ in self._by_outcome))
        self._by_outcome.clear()
        return found
