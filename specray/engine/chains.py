"""Builds the chains that a draft decodes: one per proposal, or one per likely outcome of a round.

Branches share the K/V of the prefix that they continue. Their own lie behind the sequence, branch after
branch::

    sequence                               KV indices behind it
    [told tokens][tokens under verification][its own branch][branch][branch] ...

The branch of full acceptance with the likeliest next token is the sequence's own: it lies where the sequence
goes on, so that it stays computed when the verdict confirms it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.draft_tokens import DraftTokens, SparseProbs
from specray.engine.attention.mask import MAX_TREE_ROWS, Visibility, branch_visibility
from specray.engine.cache.sequences import EngineSequence
from specray.engine.sampling.draft import DraftToken, RankedRow
from specray.engine.sampling.state import RowGroup, SamplingState, chain_rows
from specray.engine.schedule import BranchStep
from specray.errors import InvalidRequestError, OutOfBlocksError
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
    drawn: list[DraftToken] = field(default_factory=list, init=False)
    """Draft tokens so far."""
    _logprob: float = field(default=0.0, init=False)

    @property
    def is_full(self) -> bool:
        return len(self.drawn) >= self.num_wanted

    @property
    def num_left(self) -> int:
        """Draft tokens that it still wants."""
        return self.num_wanted - len(self.drawn)

    @property
    def is_judged(self) -> bool:
        """How likely its tokens are accepted decides where it ends."""
        return self.min_logprob > -math.inf

    @property
    def group(self) -> RowGroup:
        """The row from which the next token is drawn."""
        return chain_rows(self.state)

    @property
    def request_id(self) -> str:
        """Request whose grammar its tokens follow."""
        return self.sequence.request_id

    @property
    def output_ids(self) -> list[int]:
        """The output that the next token continues, draft tokens included, without the prompt."""
        return [*self.sequence.told_output_ids, *self.draft_token_ids]

    def split(self) -> tuple[list[int], list[int]]:
        """What the router has told, and the other tokens that the next token continues."""
        num_told = len(self.token_ids) - len(self.drawn)
        return self.token_ids[:num_told], self.token_ids[num_told:]

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.drawn)

    @property
    def draft_probs(self) -> tuple[SparseProbs, ...]:
        return tuple(token.probs for token in self.drawn if token.probs is not None)

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
    """The token behind them."""

    @property
    def output_ids(self) -> list[int]:
        before = (*self.accepted_ids, self.next_token_id)
        return [*self.sequence.told_output_ids, *before, *self.draft_token_ids]

    def split(self) -> tuple[list[int], list[int]]:
        num_told, held = self.prefix_len - self.num_accepted, self.sequence.token_ids
        return held[:num_told], [*held[num_told : self.prefix_len], *self.token_ids]

    def visibility(self, num_guesses: int) -> list[Visibility]:
        """What its last token sees, and so many guesses behind it."""
        length = 1 + len(self.drawn)
        return [
            branch_visibility(self.prefix_len, self.first_index, length + index)
            for index in range(1 + num_guesses)
        ]

    @property
    def end_index(self) -> int:
        """KV index behind the branch; its last draft token is never computed."""
        return self.first_index + self.num_wanted

    @property
    def reply(self) -> Branch:
        return Branch(
            self.num_accepted, self.next_token_id, DraftTokens(self.draft_token_ids, probs=self.draft_probs)
        )


@dataclass(slots=True, eq=False)
class OutcomeBranches:
    """An item that asks for outcomes.

    Rows are wanted for ``first..last`` accepted tokens; none when no branch fits the model's length.
    """

    item: SpeculateItem
    sequence: EngineSequence
    first: int
    last: int
    max_model_len: int
    branches: list[BranchChain] = field(default_factory=list)
    """Branches by number accepted, the likeliest next token first."""
    _own: BranchChain | None = None

    @property
    def num_rows(self) -> int:
        return self.last - self.first + 1

    @property
    def counts(self) -> list[int]:
        """Branches wanted for each row."""
        return list(self.item.fanout[self.first : self.last + 1])

    @property
    def excluded(self) -> list[int | None]:
        """Draft token, for each row, whose rejection the row stands for; none after full acceptance."""
        padded = (*self.item.proposed_token_ids, None)
        return list(padded[self.first : self.last + 1])

    @property
    def group(self) -> RowGroup:
        """The rows that rank next tokens, one for each number of accepted tokens."""
        state = self.sequence.told_state.fork()
        proposed = self.item.proposed_token_ids
        state.advance(proposed[: self.first])
        return chain_rows(state, proposed[self.first : self.last])

    @property
    def output_ids(self) -> list[int]:
        """The output before the first of the rows that rank next tokens."""
        return [*self.sequence.told_output_ids, *self.item.proposed_token_ids[: self.first]]

    def spread(self, ranked: Sequence[RankedRow]) -> None:
        """Makes branches of the likeliest outcomes, as far as there is room for their K/V."""
        logprobs: dict[tuple[int, int], float] = {}
        reached = 0.0
        for row, (next_tokens, accepted_logprob) in enumerate(ranked):
            for token_id, logprob in next_tokens:
                logprobs[self.first + row, token_id] = reached + logprob
            reached += accepted_logprob
        chosen = sorted(logprobs, key=lambda outcome: -logprobs[outcome])[: self.item.max_branches or None]
        own = next((outcome for outcome in chosen if outcome[0] == self.last), None)
        first_index = len(self.sequence.token_ids)
        branches: dict[tuple[int, int], BranchChain] = {}
        for outcome in sorted(chosen, key=lambda outcome: outcome != own):
            branch = self._branch(*outcome, first_index)
            try:
                self.sequence.block_table.reserve(branch.end_index)
            except OutOfBlocksError:
                continue
            branches[outcome] = branch
            first_index = branch.end_index
        self.branches = [branches[outcome] for outcome in logprobs if outcome in branches]
        self._own = branches.get(own) if own is not None else None

    @property
    def growing(self) -> list[BranchChain]:
        """The branches that are not full, by KV index."""
        return sorted(
            (branch for branch in self.branches if not branch.is_full), key=lambda branch: branch.first_index
        )

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
        """Makes the own branch the sequence's tail, when all is drawn, and frees the others' room.

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

    def _branch(self, num_accepted: int, token_id: int, first_index: int) -> BranchChain:
        prefix_len = self.sequence.num_tokens + num_accepted
        accepted = self.item.proposed_token_ids[:num_accepted]
        state = self.sequence.told_state.fork()
        state.advance((*accepted, token_id))
        return BranchChain(
            state,
            [self.sequence.own_id(token_id)],
            min(self.item.num_speculative_tokens, self.max_model_len - prefix_len - 1),
            num_accepted,
            prefix_len,
            first_index,
            accepted,
            token_id,
            sequence=self.sequence,
        )


def wanted_rows(item: SpeculateItem, max_model_len: int) -> tuple[int, int]:
    """First and last number of accepted tokens that an item wants branches for; ``(0, -1)``: none fits.

    Raises:
        InvalidRequestError: the fan-out is none for its proposed tokens.
    """
    num_proposed, length = len(item.proposed_token_ids), item.base_len + len(item.token_ids)
    if len(item.fanout) > num_proposed + 1 or min(item.fanout) < 0:
        raise InvalidRequestError(
            f"fanout is {item.fanout} for {num_proposed} proposed tokens; allowed: at most "
            f"{num_proposed + 1} numbers, 0 or more",
            field="fanout",
        )
    if item.num_speculative_tokens > MAX_TREE_ROWS:
        raise InvalidRequestError(
            f"num_speculative_tokens is {item.num_speculative_tokens}; allowed with fanout: at most "
            f"{MAX_TREE_ROWS}",
            field="num_speculative_tokens",
        )
    # A branch holds at least its next token.
    fitting = [
        accepted
        for accepted, count in enumerate(item.fanout)
        if count > 0 and length + accepted + 1 <= max_model_len
    ]
    return (fitting[0], fitting[-1]) if fitting else (0, -1)
