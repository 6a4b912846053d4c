"""What a drafter of features lets grow after a sequence: chains, and trees of the likeliest nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specray.draft_tokens import DraftTokens, TreeBudget
from specray.engine.cache.sequence import EngineSequence
from specray.engine.drafting.chains import Chain
from specray.engine.drafting.trees import DraftTree, TreeRow
from specray.engine.features.base import Context, Continued
from specray.engine.visibility import Visibility
from specray.types import Verdict, VerifyItem

_ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence whose verdict is known, and what is wanted after it."""

    sequence: EngineSequence
    """All of its tokens are accepted."""
    next_token_id: int | None
    """Token that the target has drawn after them; None: the sequence holds it, too."""
    num_tokens: int
    """Most draft tokens; of a tree, of a path."""
    min_acceptance: float = 0.0
    """Least chance that all of a chain is accepted."""
    tree: TreeBudget | None = None
    """None: a chain."""
    is_moved: bool = False
    """Whether a tree's path was accepted: K/V of its tokens are still to be moved to theirs."""


def draft_request(item: VerifyItem, sequence: EngineSequence, answer: object) -> DraftRequest | None:
    """What the item asks for after its verdict; None: nothing, or there is no verdict on a token."""
    if item.num_next_draft_tokens == 0 or not isinstance(answer, Verdict) or answer.next_token_id is None:
        return None
    return DraftRequest(
        sequence,
        answer.next_token_id,
        item.num_next_draft_tokens,
        item.next_min_acceptance,
        item.next_tree,
        is_moved=answer.last_accepted_node is not None,
    )


@dataclass(slots=True, eq=False)
class GrowingChain:
    """A chain; its next token is drawn from one row."""

    context: Context
    chain: Chain

    @property
    def rows(self) -> Sequence[Chain]:
        return () if self.chain.is_full else (self.chain,)

    @property
    def drawn(self) -> DraftTokens:
        return self.chain.drawn_tokens

    def advance(self, first_row: int) -> Continued | None:
        """The token computed next, drawn from ``first_row``; None: the chain is full."""
        if self.chain.is_full:
            return None
        index = len(self.chain.token_ids) - 1
        return Continued(
            self.context, self.chain.token_ids[-1:], (first_row,), (Visibility(index, index, 1),)
        )


@dataclass(slots=True, eq=False)
class GrowingTree:
    """A tree; all nodes of a depth are continued together."""

    context: Context
    tree: DraftTree
    rows: Sequence[TreeRow] = ()
    """Nodes whose children are drawn next."""
    _places: Mapping[int, int] = field(default_factory=dict)
    """Row of each node of the last step, counted from the tree's first."""

    def __post_init__(self) -> None:
        self.rows = self.tree.rows()
        self._places = {_ROOT: 0}

    @property
    def drawn(self) -> DraftTokens:
        return self.tree.drawn

    def advance(self, first_row: int) -> Continued | None:
        """The nodes that are computed next; None: the tree is full.

        Args:
            first_row: of the rows that their tokens were drawn from.
        """
        self.rows, step = self.tree.step()
        if step is None:
            return None
        sources = [first_row + self._places[self.tree.parent(row.node)] for row in self.rows]
        self._places = {row.node: place for place, row in enumerate(self.rows)}
        return Continued(self.context, step.token_ids, sources, step.visibility)


Growing = GrowingChain | GrowingTree
"""What grows for one request."""


def begin(request: DraftRequest, num_wanted: int, rank_acceptance: Sequence[Sequence[float]] = ()) -> Growing:
    """What grows for a request that has its room.

    Args:
        num_wanted: most tokens of a path, at least 1.
        rank_acceptance: of the drafter.
    """
    sequence = request.sequence
    next_ids = () if request.next_token_id is None else (request.next_token_id,)
    token_ids = [*sequence.token_ids, *next_ids]
    blocks, num_valid = sequence.block_table.block_ids, sequence.num_drafted_for
    context = Context(token_ids.copy(), blocks, num_valid, num_wanted)
    if request.tree is not None and not sequence.sampling.draws_by_rejection:
        tree = DraftTree(
            sequence,
            request.tree,
            num_wanted,
            min_acceptance=request.min_acceptance,
            next_ids=next_ids,
            rank_acceptance=rank_acceptance,
        )
        return GrowingTree(context, tree)
    state = sequence.committed_state.fork()
    state.advance(next_ids)
    # Log of 0 is minus infinity: no bound.
    min_logprob = math.log(request.min_acceptance) if request.min_acceptance > 0 else -math.inf
    chain = Chain(state, token_ids, num_wanted, sequence=sequence, min_logprob=min_logprob, next_ids=next_ids)
    return GrowingChain(context, chain)
