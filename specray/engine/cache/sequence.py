"""One request as an engine sees it: its tokens, and how many of them are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.engine.cache.blocks import BlockTable
from specray.engine.cache.reuse import SequencePrefix
from specray.engine.cache.snapshots import SequenceSnapshots
from specray.engine.sampling.state import CommittedTokens, SamplingState
from specray.types import SamplingParams

_COMPARED_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One request as an engine sees it.

    ``token_ids[:num_tokens]`` is the committed tokens (and the target accepted); after it lie tokens
    that only this engine has put there: draft tokens under verification, or a draft's own guesses. K/V are
    valid for ``token_ids[:num_computed_tokens]``.
    """

    request_id: str
    sampling: SamplingParams
    block_table: BlockTable
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    last_used_step: int = 0
    num_cached_tokens: int = 0
    """Tokens of the last item that were found in the prefix cache."""
    num_drafted_for: int = 0
    """First tokens that a drafter on the target has caught up with."""
    prefix: SequencePrefix | None = None
    """Known units that others may use; None: there is no prefix cache."""
    state_slot: int | None = None
    """Slot of its states in recurrent layers; None: the model has none."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: it has none."""
    snapshots: SequenceSnapshots | None = None
    """States that it leaves behind for others; None: it leaves none."""
    committed: CommittedTokens | None = None
    """The committed tokens, where the sequence holds other tokens; None: it holds those."""
    _state: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        self._state = SamplingState(self.sampling)

    @property
    def committed_state(self) -> SamplingState:
        """Sampling state of the committed tokens; fork it to go on from there."""
        if self.committed is not None:
            return self.committed.state
        self._state.advance(self.token_ids[self._state.length : self.num_tokens])
        return self._state

    @property
    def committed_output_ids(self) -> list[int]:
        if self.committed is not None:
            return self.committed.output_ids
        return self.token_ids[self.sampling.num_prompt_tokens : self.num_tokens]

    def own_id(self, token_id: int) -> int:
        """The sequence's own token for one in the router's vocabulary."""
        return token_id if self.committed is None else self.committed.own_id(token_id)

    def set_sampling(self, sampling: SamplingParams) -> None:
        if sampling != self.sampling:
            self.sampling, self._state = sampling, SamplingState(sampling)

    @property
    def num_missing_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def num_still_computed(self, base_len: int, token_ids: Sequence[int]) -> int:
        """Committed tokens whose K/V stay valid when ``token_ids`` follow the first ``base_len``."""
        num_equal = common_prefix_len(self.token_ids[base_len:], token_ids)
        return min(self.num_computed_tokens, base_len + num_equal)

    def replace_tail(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Keeps ``base_len`` tokens and appends; equal tokens after ``base_len`` stay computed.

        A tail that the new tokens only confirm is kept: accepted draft tokens and a draft-ahead chain cost
        nothing again.
        """
        tail = self.token_ids[base_len:]
        num_equal = common_prefix_len(tail, token_ids)
        self.num_tokens = base_len + len(token_ids)
        self._state.truncate(base_len + num_equal)
        if num_equal < len(token_ids):
            self.token_ids[base_len + num_equal :] = token_ids[num_equal:]
            self.num_computed_tokens = min(self.num_computed_tokens, base_len + num_equal)
            self.num_drafted_for = min(self.num_drafted_for, base_len + num_equal)

    def set_tail(self, token_ids: Sequence[int]) -> None:
        """Makes ``token_ids`` all that follows the committed tokens; equal tokens stay computed."""
        num_tokens = self.num_tokens
        self.replace_tail(num_tokens, token_ids)
        self.truncate(self.num_tokens)
        self.num_tokens = num_tokens

    def accept_tail(self, count: int) -> None:
        """Commits the first ``count`` tokens of the tail and drops the others."""
        self.truncate(self.num_tokens + count)
        self.num_tokens = len(self.token_ids)

    def accept_path(self, path: Sequence[int]) -> None:
        """Commits some tokens of the tail, a tree, and drops the others.

        Args:
            path: their places in the tail, ascending; their K/V are moved to where they are committed.
        """
        told = self.num_tokens
        kept = [self.token_ids[told + place] for place in path]
        self.truncate(told)
        self.token_ids += kept
        self.num_tokens = self.num_computed_tokens = told + len(kept)

    def truncate(self, length: int) -> None:
        """Forgets all tokens from index ``length`` on; their blocks are kept until the next reservation."""
        del self.token_ids[length:]
        self._state.truncate(length)
        self.num_tokens = min(self.num_tokens, length)
        self.num_computed_tokens = min(self.num_computed_tokens, length)
        self.num_drafted_for = min(self.num_drafted_for, length)

    def recompute_last(self, count: int) -> None:
        """Marks at least the last ``count`` tokens as not computed, so that they give logits again."""
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - count)

    def release(self) -> None:
        """Frees its blocks; idempotent. Published prefixes stay findable."""
        if self.snapshots is not None:
            self.snapshots.release()
        self.prefix = self.snapshots = None
        self.truncate(0)
        self.block_table.release()


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens in which both agree."""
    limit = min(len(first), len(second))
    start = 0
    # Lists compare in C; only the piece that differs is looked at token by token.
    while start < limit and list(first[start : start + _COMPARED_AT_ONCE]) == list(
        second[start : start + _COMPARED_AT_ONCE]
    ):
        start += _COMPARED_AT_ONCE
    start = min(start, limit)
    while start < limit and first[start] == second[start]:
        start += 1
    return start
