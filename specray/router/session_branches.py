"""What a session verifies next for each verdict that it may get: the branches that its draft has answered.

An outcome is the last draft token that is accepted (its node, -1: none) and the token that the target draws
behind it. For a chain, the number of accepted tokens says as much as the node does; for a tree it does not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from specray.draft_tokens import DraftTokens
from specray.types import Branch

Outcome = tuple[int, int]
"""The last node accepted (-1: none), and the token behind it."""


class Found(NamedTuple):
    """What was known of an outcome."""

    draft: DraftTokens | None
    """Draft tokens to verify next; None: it was not foreseen."""
    is_foreseen: bool
    """There were branches behind the node."""


NOT_FOUND: Final = Found(None, False)
"""Nothing was foreseen."""


class Branches:
    """The branches of one round."""

    __slots__ = ("_by_outcome", "_nodes", "_num_chain")

    def __init__(self) -> None:
        self._by_outcome: dict[Outcome, DraftTokens] = {}
        self._nodes: tuple[int, ...] = ()
        """Nodes of what is verified, in the order in which the draft was told them."""
        self._num_chain = 0
        """The first of them that are a chain."""

    def ask(self, nodes: tuple[int, ...], num_chain: int) -> None:
        """The draft is asked for the outcomes of some nodes, of which the first so many are a chain."""
        self._by_outcome.clear()
        self._nodes, self._num_chain = nodes, num_chain

    def add(self, branch: Branch, draft: DraftTokens) -> None:
        """Takes a branch by the node that the draft names; a node that it was not asked for is no outcome."""
        place, end = branch.num_accepted_tokens - 1, self._num_chain
        if branch.last_accepted_node is not None:
            place, end = branch.last_accepted_node, len(self._nodes)
        if place < end:
            node = self._nodes[place] if place >= 0 else -1
            self._by_outcome[node, branch.next_token_id] = draft

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
        if not self._by_outcome:
            return NOT_FOUND
        found = Found(self._by_outcome.get(outcome), any(node == outcome[0] for node, _ in self._by_outcome))
        self._by_outcome.clear()
        return found
