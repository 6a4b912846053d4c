"""What a session verifies next for each verdict that it may get: the branches that its draft has answered.

An outcome is the last draft token that is accepted (its node, -1: none) and the token that the target draws
after it. For a chain, the number of accepted tokens says as much as the node does; for a tree it does not.
"""

from __future__ import annotations

from typing import NamedTuple

from specray.draft_tokens import DraftTokens
from specray.router.session.values import Lookup
from specray.types import Branch

Outcome = tuple[int, int]
"""The last node accepted (-1: none), and the token after it."""


class BranchLookup(NamedTuple):
    """What was known of an outcome."""

    draft: DraftTokens | None
    """Draft tokens to verify next; None: it was not foreseen, or the answer has not come."""
    lookup: Lookup


class Branches:
    """The branches of one round, and the verdict that came before them."""

    __slots__ = ("_by_outcome", "_has_answer", "_nodes", "_num_chain", "_open")

    def __init__(self) -> None:
        self._by_outcome: dict[Outcome, DraftTokens] = {}
        self._nodes: tuple[int, ...] = ()
        """Nodes of what is verified, in the order in which the draft was sent them."""
        self._num_chain = 0
        """The first of them that are a chain."""
        self._has_answer = False
        """The draft has answered what it was asked last."""
        self._open: Outcome | None = None
        """The verdict that waits for the draft's answer."""

    @property
    def has_open_verdict(self) -> bool:
        """A verdict came before the draft's answer, which settles it."""
        return self._open is not None

    def ask_proposal(self) -> None:
        """The draft is asked what follows the committed tokens."""
        self._open, self._has_answer = None, False

    def ask(self, nodes: tuple[int, ...], num_chain: int) -> None:
        """The draft is asked for the outcomes of some nodes, of which the first ``num_chain`` are a chain."""
        self._by_outcome.clear()
        self._nodes, self._num_chain, self._has_answer = nodes, num_chain, False

    def add(self, branch: Branch, draft: DraftTokens) -> None:
        """Takes a branch by the node that the draft names; a node that it was not asked for is no outcome."""
        place, end = branch.num_accepted_tokens - 1, self._num_chain
        if branch.last_accepted_node is not None:
            place, end = branch.last_accepted_node, len(self._nodes)
        if place < end:
            node = self._nodes[place] if place >= 0 else -1
            self._by_outcome[node, branch.next_token_id] = draft

    def add_proposal(self, verifying: DraftTokens, drafted: DraftTokens) -> None:
        """Takes a chain that was proposed while something else is verified: the tokens that both have in
        common are accepted, then comes its next one."""
        common = verifying.common(drafted.token_ids)
        rest = len(verifying.path(common)) + 1
        if len(drafted) > rest:
            draft = DraftTokens(drafted.token_ids[rest:], probs=drafted.probs[rest:])
            self._by_outcome[common, drafted.token_ids[rest - 1]] = draft

    def look_up(self, outcome: Outcome, *, is_asked: bool, has_fanout: bool) -> BranchLookup:
        """What follows a verdict; the branches belong to the round that it ends, and are forgotten.

        Args:
            is_asked: the draft was asked about this round, whether it has answered or not.
            has_fanout: it was asked for outcomes, and not for a proposal.
        """
        draft = self._by_outcome.get(outcome)
        if draft is not None:
            lookup = Lookup.HIT
        elif not is_asked:
            lookup = Lookup.NOT_ASKED
        elif not self._has_answer:
            lookup, self._open = Lookup.PENDING, outcome
        elif has_fanout and all(node != outcome[0] for node, _ in self._by_outcome):
            lookup = Lookup.MISS_COUNT
        else:
            lookup = Lookup.MISS_TOKEN
        self._by_outcome.clear()
        return BranchLookup(draft, lookup)

    def settle(self) -> BranchLookup | None:
        """The draft has answered: settles the verdict that waited for it. None: none did. The first answer
        decides."""
        if self._open is None:
            self._has_answer = True
            return None
        draft, self._open = self._by_outcome.get(self._open), None
        self._by_outcome.clear()
        return BranchLookup(draft, Lookup.MISS_TOKEN if draft is None else Lookup.HIT)

    def give_up(self) -> None:
        self._open = None
