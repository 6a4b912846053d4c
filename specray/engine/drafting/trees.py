"""Grows a tree of draft tokens for one proposal: the nodes that the target reaches most likely.

All nodes of one depth are continued in one forward. Children are the best tokens of a row's scores, with the
noise of their position, which all nodes of a depth share; so a node's first child is what a chain would have
drawn there. The distances of the scores say how likely the target draws each of them, and the products along
a path how likely its node is reached: nodes are added in that order.

The nodes' K/V lie after the sequence. Those of the *spine*, which takes the first child of every node, lie
where the sequence goes on, so that they stay computed when the verdict confirms them; what the verdict takes
of other branches is computed again, in the forward that reads the verdict's own token::

    sequence       KV indices after it
    [committed tokens]  [spine: depth 0, 1, 2, ...][other nodes, in the order in which they were continued]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specray.draft_tokens import DraftTokens, TreeBudget
from specray.engine.cache.sequence import EngineSequence
from specray.engine.sampling.draft import RankedRow
from specray.engine.sampling.draws import SCORE_SPREAD
from specray.engine.sampling.state import RowGroup, chain_rows
from specray.engine.schedule import BranchStep
from specray.engine.visibility import MAX_TREE_ROWS, Visibility
from specray.errors import OutOfBlocksError

CHILDREN = 8
"""Children of a node that are looked at; the target draws others at hardly any position."""
SPREAD = 1.0
"""Distance of two scores (logits, with noise), as SCORE_SPREAD, of a node's children: they differ by a factor
of e in the chance that the target draws their tokens.

Measured on SmolLM2-135M and the draft trained for it, over 576 places of nine Spec-Bench outputs: by it, the
best tokens of a row have 0.60, 0.11, 0.05 and 0.04 where the target drew them in 0.56, 0.09, 0.05 and 0.03 at
temperature 0; 0.52, 0.14, 0.07 and 0.04 for 0.46, 0.09, 0.06 and 0.05 at temperature 1."""
REACHED = 0.85
"""Chance that the target draws one of the best eight. It was 0.78 and 0.75 there; a surer draft has more."""
_ROOT = -1


@dataclass(slots=True, eq=False)
class _Node:
    """One draft token."""

    token_id: int
    parent: int
    """Index of the parent; -1: the last committed token."""
    depth: int
    logprob: float
    """Estimated log probability that it is reached."""
    is_spine: bool
    mask: int = 0
    """Ancestors and itself among the rows after the sequence; 0: its row is not computed."""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row whose next tokens become the children of a node."""

    tree: DraftTree
    node: int
    """Index of the node; -1: the root."""

    @property
    def request_id(self) -> str:
        return self.tree.sequence.request_id

    @property
    def count(self) -> int:
        return self.tree.num_children(self.node)

    @property
    def output_ids(self) -> list[int]:
        """The output that the children continue, draft tokens included, without the prompt."""
        return [*self.tree.sequence.committed_output_ids, *self.tree.next_ids, *self.tree.path(self.node)]

    @property
    def group(self) -> RowGroup:
        """The row as it is sampled from."""
        state = self.tree.sequence.committed_state.fork()
        state.advance((*self.tree.next_ids, *self.tree.path(self.node)))
        return chain_rows(state)


class DraftTree:
    """An item that asks for a tree.

    Args:
        sequence: of the request, with nothing after its committed tokens.
        budget: nodes, or a shape.
        depth: most tokens of a path.
        min_acceptance: least chance that one of the leaves is reached, at which nodes are added to them.
        next_ids: tokens between the committed ones and the root's children.
        rank_acceptance: by depth, the chance of each rank; empty: the scores of each row say it.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        budget: TreeBudget,
        depth: int,
        *,
        min_acceptance: float,
        next_ids: tuple[int, ...] = (),
        rank_acceptance: Sequence[Sequence[float]] = (),
    ) -> None:
        self.sequence = sequence
        self.next_ids = next_ids
        self._rank_acceptance = rank_acceptance
        self.start = sequence.num_tokens + len(next_ids)
        """KV index of the first row after the tokens that it continues."""
        self.num_wanted = min(depth, len(budget.widths)) if budget.widths else depth
        self._budget = budget
        self._min_acceptance = 0.0 if budget.widths else min_acceptance
        self._min_logprob = -math.inf
        if budget.min_chance > 0 and not budget.widths:
            self._min_logprob = math.log(budget.min_chance)
        self._nodes: list[_Node] = []
        self._depth = 0
        """Nodes of the longest path so far."""
        self._num_slots = max(0, self.num_wanted - 1)
        """Rows after the sequence that are taken: first those of the spine, whether or not it gets there."""
        self._has_room = True

    def rows(self) -> list[TreeRow]:
        """The first row, which the sequence's last token gives."""
        return [TreeRow(self, _ROOT)] if self.num_wanted > 0 else []

    def num_children(self, node: int) -> int:
        depth = 0 if node == _ROOT else self._nodes[node].depth + 1
        return self._budget.widths[depth] if self._budget.widths else CHILDREN

    def parent(self, node: int) -> int:
        return self._nodes[node].parent

    def path(self, node: int) -> list[int]:
        """Tokens from the root to a node."""
        tokens: list[int] = []
        while node != _ROOT:
            tokens.append(self._nodes[node].token_id)
            node = self._nodes[node].parent
        return tokens[::-1]

    def add(self, node: int, ranked: RankedRow) -> None:
        """Takes the tokens that may follow a node."""
        parent = None if node == _ROOT else self._nodes[node]
        depth, reached = (0, 0.0) if parent is None else (parent.depth + 1, parent.logprob)
        for rank, (token_id, logprob) in enumerate(self._judged(ranked.next_tokens, depth)):
            is_spine = rank == 0 and (parent is None or parent.is_spine)
            child = _Node(token_id, node, depth, reached + logprob, is_spine)
            # The first token is always there.
            if child.logprob >= self._min_logprob or not self._nodes:
                self._nodes.append(child)
                self._depth = max(self._depth, depth + 1)

    def _judged(self, next_tokens: Sequence[tuple[int, float]], depth: int) -> list[tuple[int, float]]:
        """The tokens with the log of their chance; those of ranks that were not measured are left out."""
        if depth >= len(self._rank_acceptance):
            return _calibrated(next_tokens)
        rates = self._rank_acceptance[depth]
        if self._budget.widths and len(rates) < len(next_tokens):
            # A shape has all of its children.
            rates = (*rates, *[rates[-1]] * (len(next_tokens) - len(rates)))
        return [(token_id, math.log(rate)) for (token_id, _), rate in zip(next_tokens, rates, strict=False)]

    def step(self) -> tuple[list[TreeRow], BranchStep | None]:
        """The nodes that are continued next, and the forward's rows for them."""
        last = self._depth - 1
        if last < 0 or self._depth >= self.num_wanted:
            return [], None
        leaves = [index for index in self._kept() if self._nodes[index].depth == last]
        if sum(math.exp(self._nodes[index].logprob) for index in leaves) < self._min_acceptance:
            return [], None
        # The spine first: its K/V lie before the others'.
        leaves.sort(key=lambda index: not self._nodes[index].is_spine)
        growing = [index for index in leaves if not self._is_end(index) and self._place(index)]
        if not growing:
            return [], None
        sequence, start = self.sequence, self.start
        token_ids = [sequence.own_id(self._nodes[index].token_id) for index in growing]
        visibility = [Visibility(start, start, self._nodes[index].mask) for index in growing]
        return [TreeRow(self, index) for index in growing], BranchStep(sequence, token_ids, visibility)

    def settle(self) -> DraftTokens:
        """Keeps the first chain's K/V, frees the rest, returns the tree."""
        sequence = self.sequence
        spine = [self._nodes[index] for index in self._kept() if self._nodes[index].is_spine]
        sequence.token_ids.extend(sequence.own_id(node.token_id) for node in spine)
        sequence.num_computed_tokens = sequence.num_tokens + sum(node.mask > 0 for node in spine)
        sequence.block_table.truncate(len(sequence.token_ids))
        return self.drawn

    @property
    def drawn(self) -> DraftTokens:
        """The tree so far."""
        kept = self._kept()
        places = {_ROOT: _ROOT} | {index: place for place, index in enumerate(kept)}
        return DraftTokens(
            tuple(self._nodes[index].token_id for index in kept),
            tuple(places[self._nodes[index].parent] for index in kept),
        )

    def _kept(self) -> list[int]:
        """The likeliest nodes, best first, as many as there may be; a parent is likelier than its child."""
        best = sorted((-node.logprob, index) for index, node in enumerate(self._nodes))
        return [index for _, index in best[: self._budget.num_nodes]]

    def _is_end(self, index: int) -> bool:
        """Whether the node stops its grammar, so that nothing follows."""
        sampling = self.sequence.sampling
        return sampling.grammar is not None and self._nodes[index].token_id in sampling.stop_token_ids

    def _place(self, index: int) -> bool:
        """Gives a node's row its place after the sequence. False: there is no room."""
        node = self._nodes[index]
        if node.is_spine:
            slot = node.depth
        else:
            slot = self._num_slots
            if slot >= MAX_TREE_ROWS or not self._reserve(slot + 1):
                return False
            self._num_slots += 1
        node.mask = (0 if node.parent == _ROOT else self._nodes[node.parent].mask) | 1 << slot
        return True

    def _reserve(self, num_rows: int) -> bool:
        """Room for ``num_rows`` after the sequence; without it, the tree has fewer branches."""
        if self._has_room:
            try:
                self.sequence.block_table.reserve(self.start + num_rows)
            except OutOfBlocksError:
                self._has_room = False
        return self._has_room


def _calibrated(next_tokens: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Tokens with their log probabilities at the spread SPREAD, whose sum is REACHED."""
    if not next_tokens:
        return []
    scores = [SCORE_SPREAD / SPREAD * logprob for _, logprob in next_tokens]
    total = math.log(sum(map(math.exp, scores))) - math.log(REACHED)
    return [(token_id, score - total) for (token_id, _), score in zip(next_tokens, scores, strict=True)]
