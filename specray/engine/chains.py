"""What a draft continues: a sequence by a proposal, or the likely outcomes of a round as its branches.

Branches share the K/V of the sequence that they leave. Their own lie behind it, branch after branch::

    sequence                               places behind it
    [told tokens][tokens under verification][its own branch][branch][branch] ...

The likeliest outcome of most acceptance is the sequence's own branch: it lies where the sequence goes on, so
that it stays computed when the verdict confirms it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.engine.attention.mask import Visibility, branch_visibility
from specray.engine.cache.sequences import EngineSequence
from specray.engine.sampling.draft import DraftToken, RankedRow
from specray.engine.sampling.processors import RowGroup
from specray.engine.schedule import BranchStep
from specray.errors import OutOfBlocksError
from specray.types import Branch, DraftTokens, SamplingParams, SparseProbs, SpeculateItem


@dataclass(slots=True, eq=False)
class Line:
    """Tokens to continue by ``num_wanted`` draft tokens."""

    token_ids: list[int]
    """With the draft tokens drawn so far."""
    sampling: SamplingParams
    num_wanted: int
    min_logprob: float = field(default=-math.inf, kw_only=True)
    """Of the acceptance of all draft tokens together; the line ends before it would fall below."""
    drawn: list[DraftToken] = field(default_factory=list, init=False)
    _logprob: float = field(default=0.0, init=False)

    @property
    def is_full(self) -> bool:
        return len(self.drawn) >= self.num_wanted

    @property
    def is_judged(self) -> bool:
        """How likely its tokens are accepted decides where it ends."""
        return self.min_logprob > -math.inf

    @property
    def group(self) -> RowGroup:
        """The row from which the next token is drawn."""
        return RowGroup(self.sampling, self.token_ids, 1)

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.drawn)

    @property
    def draft_probs(self) -> tuple[SparseProbs, ...]:
        return tuple(token.probs for token in self.drawn if token.probs is not None)

    def take(self, token: DraftToken) -> None:
        """Appends a draft token, or ends the line before it."""
        self._logprob += token.logprob
        if self.drawn and self._logprob < self.min_logprob:
            self.num_wanted = len(self.drawn)
            return
        self.drawn.append(token)
        self.token_ids.append(token.token_id)


@dataclass(slots=True, eq=False)
class BranchLine(Line):
    """One outcome: so many tokens under verification accepted, then a next token, then draft tokens."""

    num_accepted: int
    trunk_len: int
    """Tokens of the sequence that it begins with."""
    first_place: int

    @property
    def next_token_id(self) -> int:
        return self.token_ids[self.trunk_len]

    @property
    def visibility(self) -> Visibility:
        """What its last token sees."""
        return branch_visibility(self.trunk_len, self.first_place, 1 + len(self.drawn))

    @property
    def end_place(self) -> int:
        """Its last draft token is never computed."""
        return self.first_place + self.num_wanted

    @property
    def reply(self) -> Branch:
        return Branch(
            self.num_accepted, self.next_token_id, DraftTokens(self.draft_token_ids, probs=self.draft_probs)
        )


@dataclass(slots=True, eq=False)
class Branching:
    """An item that asks for outcomes.

    Rows are wanted for ``first..last`` accepted tokens; none when no branch fits the model's length.
    """

    item: SpeculateItem
    sequence: EngineSequence
    first: int
    last: int
    max_model_len: int
    branches: list[BranchLine] = field(default_factory=list)
    """By number accepted, the likeliest next token of each first."""
    _own: BranchLine | None = None

    @property
    def num_rows(self) -> int:
        return self.last - self.first + 1

    @property
    def counts(self) -> list[int]:
        """Branches wanted for each row."""
        return list(self.item.fanout[self.first : self.last + 1])

    @property
    def excluded(self) -> list[int | None]:
        """For each row the draft token whose rejection the row stands for; none after full acceptance."""
        padded = (*self.item.proposed_token_ids, None)
        return list(padded[self.first : self.last + 1])

    @property
    def group(self) -> RowGroup:
        return RowGroup(self.sequence.sampling, self.sequence.token_ids, self.num_rows)

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
        place = len(self.sequence.token_ids)
        branches: dict[tuple[int, int], BranchLine] = {}
        for outcome in sorted(chosen, key=lambda outcome: outcome != own):
            branch = self._branch(*outcome, place)
            try:
                self.sequence.block_table.reserve(branch.end_place)
            except OutOfBlocksError:
                continue
            branches[outcome] = branch
            place = branch.end_place
        self.branches = [branches[outcome] for outcome in logprobs if outcome in branches]
        self._own = branches.get(own) if own is not None else None

    def step(self) -> tuple[list[BranchLine], BranchStep | None]:
        """The branches that are not full, and the rows that continue them."""
        growing = sorted(
            (branch for branch in self.branches if not branch.is_full), key=lambda branch: branch.first_place
        )
        if not growing:
            return [], None
        token_ids = [branch.token_ids[-1] for branch in growing]
        return growing, BranchStep(self.sequence, token_ids, [branch.visibility for branch in growing])

    def settle(self) -> None:
        """When all is drawn: the own branch becomes the sequence's tail, the others' room is free again."""
        sequence, own = self.sequence, self._own
        if own is not None:
            num_computed = own.end_place
            sequence.token_ids[own.trunk_len :] = own.token_ids[own.trunk_len :]
            sequence.num_computed_tokens = num_computed
        sequence.block_table.truncate(len(sequence.token_ids))

    def _branch(self, num_accepted: int, token_id: int, place: int) -> BranchLine:
        trunk_len = self.sequence.num_tokens + num_accepted
        return BranchLine(
            [*self.sequence.token_ids[:trunk_len], token_id],
            self.sequence.sampling,
            min(self.item.num_speculative_tokens, self.max_model_len - trunk_len - 1),
            num_accepted,
            trunk_len,
            place,
        )
