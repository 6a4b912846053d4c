"""Builds the chains that a draft decodes: one per proposal, or one per likely outcome of a round.

Branches share the K/V of the prefix that they continue. Their own lie after the sequence, branch after
branch::

    sequence                               KV indices after it
    [committed tokens][tokens under verification][its own branch][branch][branch] ...

The branch of full acceptance with the likeliest next token is the sequence's own: it lies where the sequence
goes on, so that it stays computed when the verdict confirms it. Of a tree under verification, the first chain
is the sequence's tail; its other nodes lie after the own branch, and the branches after them see their
ancestors there::

    sequence                     KV indices after it
    [committed tokens][first chain]   [own branch][other nodes][branches after them][other branches] ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.draft_tokens import DraftTokens
from specray.engine.cache.sequence import EngineSequence
from specray.engine.sampling.draft import UNLIKELY, DraftToken, RankedRow
from specray.engine.sampling.state import RowGroup, SamplingState, chain_rows, draft_rows
from specray.engine.schedule import BranchStep, CatchUp
from specray.engine.visibility import MAX_TREE_ROWS, Visibility
from specray.errors import OutOfBlocksError
from specray.types import Branch, SpeculateItem


@dataclass(slots=True, eq=False)
class Chain:
    """Tokens to continue by ``num_wanted`` draft tokens."""

    state: SamplingState
    """State of all tokens so far; the chain's own."""
    token_ids: list[int]
    """Tokens to which draft tokens are appended; the last one is computed next."""
    num_wanted: int
    """Number of draft tokens at which the chain is full."""
    sequence: EngineSequence = field(kw_only=True)
    """Sequence that the chain continues."""
    min_logprob: float = field(default=-math.inf, kw_only=True)
    """Least log probability that all draft tokens are accepted; the chain ends before it falls below."""
    next_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Tokens between the committed ones and the first draft token."""
    drawn: list[DraftToken] = field(default_factory=list, init=False)
    """Draft tokens so far."""
    _logprob: float = field(default=0.0, init=False)

    @property
    def is_full(self) -> bool:
        return len(self.drawn) >= self.num_wanted

    @property
    def num_left(self) -> int:
        return self.num_wanted - len(self.drawn)

    @property
    def is_judged(self) -> bool:
        """How likely its tokens are accepted decides where it ends."""
        return self.min_logprob > -math.inf

    @property
    def group(self) -> RowGroup:
        return chain_rows(self.state)

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def output_ids(self) -> list[int]:
        """The output that the next token continues, draft tokens included, without the prompt."""
        return [*self.sequence.committed_output_ids, *self.next_ids, *self.draft_token_ids]

    def split(self) -> tuple[list[int], list[int]]:
        """The committed tokens, and those after them."""
        num_told = len(self.token_ids) - len(self.drawn)
        return self.token_ids[:num_told], self.token_ids[num_told:]

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.drawn)

    @property
    def drawn_tokens(self) -> DraftTokens:
        probs = tuple(token.probs for token in self.drawn if token.probs is not None)
        return DraftTokens(self.draft_token_ids, probs=probs)

    def take(self, token: DraftToken | None) -> None:
        """Appends a draft token, or ends the chain before it; in a grammar nothing follows a stop.

        Args:
            token: None: there is none that the target could draw.
        """
        if token is None:
            self.num_wanted = len(self.drawn)
            return
        self._logprob += token.logprob
        if self.drawn and self._logprob < self.min_logprob:
            self.num_wanted = len(self.drawn)
            return
        self.drawn.append(token)
        self.token_ids.append(self.sequence.own_id(token.token_id))
        self.state.advance((token.token_id,))
        sampling = self.state.sampling
        if sampling.grammar is not None and token.token_id in sampling.stop_token_ids:
            self.num_wanted = len(self.drawn)


@dataclass(slots=True, eq=False)
class BranchChain(Chain):
    """One outcome: some tokens under verification accepted, then a next token, then draft tokens.

    ``token_ids`` begin with the next token.
    """

    num_accepted: int
    """Number of accepted tokens under verification."""
    prefix_len: int
    """Number of the sequence's tokens that the branch continues."""
    first_index: int
    """KV index of the next token."""
    accepted_ids: tuple[int, ...]
    """The accepted tokens."""
    next_token_id: int
    """The token after them."""
    base_index: int
    """KV index of the first row that it sees after the prefix: of its own, or of a node of a tree."""
    ancestors: int = 0
    """Mask of the tree's nodes that it sees from there on."""
    node: int | None = None
    """Last accepted token among those under verification; None: they are the first of a chain."""

    def split(self) -> tuple[list[int], list[int]]:
        sequence = self.sequence
        accepted = map(sequence.own_id, self.accepted_ids)
        return sequence.token_ids[: sequence.num_tokens], [*accepted, *self.token_ids]

    def visibility(self, num_guesses: int) -> list[Visibility]:
        """Visibility of its last token, and of the guesses after it."""
        length, base = 1 + len(self.drawn), self.base_index
        before, shift = self.ancestors, self.first_index - base
        return [
            Visibility(self.prefix_len, base, before | ((1 << length + index) - 1) << shift)
            for index in range(1 + num_guesses)
        ]

    @property
    def end_index(self) -> int:
        """KV index after the branch; its last draft token is never computed."""
        return self.first_index + self.num_wanted

    @property
    def reply(self) -> Branch:
        return Branch(self.num_accepted, self.next_token_id, self.drawn_tokens, self.node)


@dataclass(frozen=True, slots=True)
class _OtherNode:
    """A node of a tree under verification that is not in its first chain."""

    node: int
    """Index among the item's proposed tokens."""
    visibility: Visibility
    """Visibility of the node's row, after the sequence."""


@dataclass(slots=True, eq=False)
class OutcomeBranches:
    """An item that asks for outcomes.

    Rows are wanted for ``first..last`` accepted tokens of the first chain; none when no branch fits the
    model's length. Of a tree, rows are wanted for its other nodes, too.
    """

    item: SpeculateItem
    sequence: EngineSequence
    first: int
    last: int
    max_model_len: int
    branches: list[BranchChain] = field(default_factory=list)
    """Branches by node, and so by number accepted in a chain, the likeliest next token first."""
    _others: list[_OtherNode] = field(default_factory=list)
    _tree: DraftTokens = field(init=False)
    """The tokens under verification of which there are rows, a chain or a tree."""
    _own: BranchChain | None = None

    def __post_init__(self) -> None:
        if self.item.proposed_parents is not None and self.last >= 0:
            self._others = self._place_others(self.item.proposed_parents)
        self._tree = self.item.proposed.only(
            [*range(max(self.last, 0)), *(other.node for other in self._others)]
        )

    @property
    def request_id(self) -> str:
        return self.item.request_id

    @property
    def num_rows(self) -> int:
        return self.last - self.first + 1 + len(self._others)

    @property
    def counts(self) -> list[int]:
        """Tokens to rank in each row: branches wanted, and of a tree the node's children besides."""
        fanout = self.item.fanout
        counts = list(fanout[self.first : self.last + 1])
        if not self._others:
            return counts
        counts += [fanout[other.node + 1] for other in self._others]
        return [count + len(self._children(row - 1)) for row, count in enumerate(counts)]

    @property
    def excluded(self) -> list[int | None]:
        """Draft token, for each row, whose rejection the row stands for; none after full acceptance, nor of a
        tree, where a row may have several."""
        if self._others:
            return [None] * self.num_rows
        padded = (*self.item.of_first_chain().proposed_token_ids, None)
        return list(padded[self.first : self.last + 1])

    @property
    def group(self) -> RowGroup:
        state = self.sequence.committed_state.fork()
        if self._others:
            return draft_rows(state, self._tree)
        proposed = self.item.proposed_token_ids
        state.advance(proposed[: self.first])
        return chain_rows(state, proposed[self.first : self.last])

    @property
    def output_ids(self) -> list[int]:
        """The output before the first of the rows that rank next tokens."""
        return [*self.sequence.committed_output_ids, *self.item.proposed_token_ids[: self.first]]

    def catch_up(self) -> CatchUp:
        """All missing tokens, and the nodes outside the first chain, with the rows that rank next tokens."""
        proposed = self.item.proposed_token_ids
        token_ids = [self.sequence.own_id(proposed[other.node]) for other in self._others]
        visibility = [other.visibility for other in self._others]
        return CatchUp(self.sequence, self.num_rows, extra_token_ids=token_ids, extra_visibility=visibility)

    def spread(self, ranked: Sequence[RankedRow]) -> None:
        """Makes branches of the likeliest outcomes, as far as there is room for their K/V."""
        logprobs = self._outcomes_of_tree(ranked) if self._others else self._outcomes_of_chain(ranked)
        chosen = sorted(logprobs, key=lambda outcome: -logprobs[outcome])[: self.item.max_branches or None]
        own = next((outcome for outcome in chosen if outcome[0] == self.last - 1), None)
        own_index = len(self.sequence.token_ids)
        first_index = self._others[-1].visibility.kv_index + 1 if self._others else own_index
        branches: dict[tuple[int, int], BranchChain] = {}
        # Behind the other nodes come branches that must see them: a mask covers few rows.
        for outcome in sorted(chosen, key=lambda outcome: (outcome != own, outcome[0] < self.last)):
            branch = self._branch(*outcome, own_index if outcome == own else first_index)
            try:
                self.sequence.block_table.reserve(branch.end_index)
            except OutOfBlocksError:
                continue
            if branch.ancestors and branch.end_index - branch.base_index > MAX_TREE_ROWS:
                continue
            branches[outcome] = branch
            first_index = max(first_index, branch.end_index)
        self.branches = [branches[outcome] for outcome in logprobs if outcome in branches]
        self._own = branches.get(own) if own is not None else None

    def _outcomes_of_chain(self, ranked: Sequence[RankedRow]) -> dict[tuple[int, int], float]:
        """Log probabilities of outcomes: of the last accepted token (-1: none), and of the next."""
        logprobs: dict[tuple[int, int], float] = {}
        reached = 0.0
        for node, (next_tokens, accepted_logprob) in enumerate(ranked, self.first - 1):
            for token_id, logprob in next_tokens:
                logprobs[node, token_id] = reached + logprob
            reached += accepted_logprob
        return logprobs

    def _outcomes_of_tree(self, ranked: Sequence[RankedRow]) -> dict[tuple[int, int], float]:
        """Log probabilities of a tree's outcomes; no child of a node is a next token after it."""
        logprobs: dict[tuple[int, int], float] = {}
        reached = {-1: 0.0}
        for node, (next_tokens, _) in enumerate(ranked, -1):
            chances, children = dict(next_tokens), self._children(node)
            for child in children:
                reached[child] = reached[node] + chances.pop(self._tree.token_ids[child], UNLIKELY)
            for token_id in list(chances)[: len(next_tokens) - len(children)]:
                logprobs[node, token_id] = reached[node] + chances[token_id]
        return logprobs

    def _children(self, node: int) -> list[int]:
        parents = self._tree.parents or range(-1, len(self._tree) - 1)
        return [child for child, parent in enumerate(parents) if parent == node]

    def _place_others(self, parents: Sequence[int]) -> list[_OtherNode]:
        """Places of the nodes outside the first chain, after the own branch; none where there is no room."""
        told, num_chain = self.sequence.num_tokens, len(self.item.proposed.first_path)
        start = told + self.last + self._num_wanted(told + self.last)
        seen: dict[int, tuple[int, int]] = {-1: (told, 0)}
        seen |= {node: (told + node + 1, 0) for node in range(self.last)}
        others: list[_OtherNode] = []
        for node in range(num_chain, len(parents)):
            if parents[node] not in seen:
                continue
            prefix_len, ancestors = seen[parents[node]]
            visibility = Visibility(prefix_len, start, ancestors | 1 << len(others))
            # A branch holds at least its next token.
            if visibility.position + 1 < self.max_model_len:
                seen[node] = prefix_len, visibility.ancestors
                others.append(_OtherNode(node, visibility))
        try:
            self.sequence.block_table.reserve(start + len(others))
        except OutOfBlocksError:
            return []
        return others

    def _num_wanted(self, prefix_len: int) -> int:
        """Draft tokens of a branch after a next token at this position."""
        return min(self.item.num_speculative_tokens, self.max_model_len - prefix_len - 1)

    @property
    def growing(self) -> list[BranchChain]:
        """The branches that are not full, by KV index."""
        return sorted(
            (branch for branch in self.branches if not branch.is_full), key=lambda branch: branch.first_index
        )

    def work(self, growing: Sequence[BranchChain], guesses: Sequence[Sequence[int]]) -> CatchUp | BranchStep:
        """The step that continues some branches; behind a state there is the sequence's own alone."""
        if self.sequence.state_slot is None:
            return self.step(growing, guesses)
        [own], [guess] = growing, guesses
        self.sequence.token_ids[own.prefix_len :] = own.token_ids
        return CatchUp(self.sequence, 1 + len(guess), extra_token_ids=guess)

    def step(self, growing: Sequence[BranchChain], guesses: Sequence[Sequence[int]]) -> BranchStep:
        """The rows that continue some branches: the last token of each, and its guesses."""
        return BranchStep(
            self.sequence,
            [
                token_id
                for branch, guess in zip(growing, guesses, strict=True)
                for token_id in (branch.token_ids[-1], *guess)
            ],
            [
                row
                for branch, guess in zip(growing, guesses, strict=True)
                for row in branch.visibility(len(guess))
            ],
        )

    def settle(self, *, drew_behind_masks: bool) -> None:
        """Makes the own branch the sequence's tail and frees the others' blocks.

        Args:
            drew_behind_masks: of each branch the next token alone was computed.
        """
        sequence, own = self.sequence, self._own
        if own is not None:
            num_computed = own.end_index
            if drew_behind_masks:
                num_computed = min(own.first_index + 1, num_computed)
            sequence.token_ids[own.prefix_len :] = own.token_ids
            sequence.num_computed_tokens = num_computed
        sequence.block_table.truncate(len(sequence.token_ids))

    def _branch(self, node: int, token_id: int, first_index: int) -> BranchChain:
        sequence, tree = self.sequence, self._tree
        accepted = tuple(tree.token_ids[index] for index in tree.path(node))
        prefix_len, base_index, ancestors, last_node = sequence.num_tokens + node + 1, first_index, 0, None
        if node >= self.last:
            other = self._others[node - self.last]
            prefix_len, start, mask = other.visibility
            lowest = (mask & -mask).bit_length() - 1
            base_index, ancestors, last_node = start + lowest, mask >> lowest, other.node
        state = sequence.committed_state.fork()
        state.advance((*accepted, token_id))
        return BranchChain(
            state,
            [sequence.own_id(token_id)],
            self._num_wanted(sequence.num_tokens + len(accepted)),
            len(accepted),
            prefix_len,
            first_index,
            accepted,
            token_id,
            base_index,
            ancestors,
            last_node,
            sequence=sequence,
            next_ids=(*accepted, token_id),
        )
