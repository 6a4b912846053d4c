"""State that logits processors keep of a sequence's prefix from step to step, with undo and copies.

Penalties need counts of the prefix's tokens; ``min_tokens`` and the noise need its length; bias needs
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specray.draft_tokens import DraftTokens
from specray.types import SamplingParams


class SamplingState:
    """The state of one prefix.

    A request without penalties keeps a length, so that a fork costs nothing.

    Args:
        sampling: parameters of the request.
        token_ids: the prefix.
    """

    __slots__ = ("_counts", "_history", "_length", "_output_counts", "sampling")

    def __init__(self, sampling: SamplingParams, token_ids: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self._length = 0
        counts_all = sampling.repetition_penalty != 1.0
        counts_output = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._counts: Counter[int] | None = Counter() if counts_all else None
        self._output_counts: Counter[int] | None = Counter() if counts_output else None
        has_long_words = any(len(word) > 1 for word in sampling.bad_words)
        self._history: list[int] | None = [] if counts_all or counts_output or has_long_words else None
        """Tokens of the prefix, for ``truncate`` and for bad words; None: nothing depends on them."""
        self.advance(token_ids)

    @property
    def length(self) -> int:
        return self._length

    def output_tail(self, count: int) -> list[int]:
        """The last ``count`` tokens of the output, or all of a shorter one; kept for long bad words alone."""
        assert self._history is not None, "somebody needs the tokens"
        first = max(self.sampling.num_prompt_tokens, self._length - count)
        return self._history[first:]

    @property
    def counts(self) -> Counter[int] | None:
        """Number of each token in prompt and output; None without a repetition penalty."""
        return self._counts

    @property
    def output_counts(self) -> Counter[int] | None:
        """Number of each token in the output; None without a presence or frequency penalty."""
        return self._output_counts

    def advance(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the prefix."""
        if self._counts is not None:
            self._counts.update(token_ids)
        if self._output_counts is not None:
            num_prompt = max(0, self.sampling.num_prompt_tokens - self._length)
            self._output_counts.update(token_ids[num_prompt:])
        if self._history is not None:
            self._history.extend(token_ids)
        self._length += len(token_ids)

    def truncate(self, length: int) -> None:
        """Forgets all tokens from index ``length`` on; a prefix that is no longer stays as it is."""
        if length >= self._length:
            return
        if self._history is not None:
            if self._counts is not None:
                _subtract(self._counts, self._history[length:])
            if self._output_counts is not None:
                first = max(length, self.sampling.num_prompt_tokens)
                _subtract(self._output_counts, self._history[first:])
            del self._history[length:]
        self._length = length

    def fork(self) -> SamplingState:
        """A state of the same prefix that goes its own way."""
        copy = SamplingState.__new__(SamplingState)
        copy.sampling, copy._length = self.sampling, self._length
        copy._counts = None if self._counts is None else self._counts.copy()
        copy._output_counts = None if self._output_counts is None else self._output_counts.copy()
        copy._history = None if self._history is None else self._history.copy()
        return copy


class CommittedTokens(Protocol):
    """What the router has sent of a request whose sequence holds other tokens: a draft's view of it."""

    @property
    def state(self) -> SamplingState: ...

    @property
    def output_ids(self) -> list[int]: ...

    def own_id(self, token_id: int) -> int:
        """The token that the sequence holds for one that follows."""
        ...


def _subtract(counts: Counter[int], token_ids: Sequence[int]) -> None:
    """Counts that reach 0 are left out, as in a state that never saw the token."""
    for token_id in token_ids:
        counts[token_id] -= 1
        if not counts[token_id]:
            del counts[token_id]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Logits rows of one sequence: row 0 follows the prefix, row j + 1 the token j under verification."""

    sampling: SamplingParams
    state: SamplingState
    """State of the prefix; not changed by whoever reads the rows."""
    token_ids: Sequence[int]
    """Tokens under verification after the prefix, one fewer than rows."""
    positions: Sequence[int]
    """Absolute position of the token that each row predicts."""
    token_masks: NDArray[np.int32] | None = None
    """Bits of the tokens that a grammar allows each row, ``[num_rows, num_words]``; None: all of them."""
    parents: Sequence[int] | None = None
    """Index of the token before each of ``token_ids``, -1: the prefix's last. None: the one before it."""

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def is_tested(self) -> bool:
        """Whether each draft token is accepted by a test of its own, as those of chains under rejection."""
        return self.sampling.draws_by_rejection and self.parents is None

    @property
    def first_position(self) -> int:
        """Absolute position of the token that row 0 predicts."""
        return self.positions[0]

    def path(self, row: int) -> Sequence[int]:
        """Indices of the tokens under verification that a row follows, in their order."""
        if self.parents is None:
            return range(row)
        indices, index = [], row - 1
        while index >= 0:
            indices.append(index)
            index = self.parents[index]
        return indices[::-1]


def chain_rows(
    state: SamplingState,
    token_ids: Sequence[int] = (),
    *,
    token_masks: NDArray[np.int32] | None = None,
) -> RowGroup:
    positions = range(state.length, state.length + len(token_ids) + 1)
    return RowGroup(state.sampling, state, token_ids, positions, token_masks)


def draft_rows(
    state: SamplingState, draft: DraftTokens, *, token_masks: NDArray[np.int32] | None = None
) -> RowGroup:
    """The rows of a prefix and of draft tokens after it, a chain or a tree."""
    if draft.parents is None:
        return chain_rows(state, draft.token_ids, token_masks=token_masks)
    positions = [state.length, *(state.length + 1 + depth for depth in draft.depths)]
    return RowGroup(state.sampling, state, draft.token_ids, positions, token_masks, draft.parents)
