"""What an engine remembers of its requests: tokens, how many of them are computed, and where.

The table owns *which* sequence holds which blocks; it never touches a tensor. Its one verb is *keep, append*:
keep the first ``base_len`` tokens that the router has told, append more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specray.engine.cache import BlockAllocator, BlockTable
from specray.errors import InvalidRequestError, OutOfBlocksError, OverloadedError, SpecrayError
from specray.types import SamplingParams

_MIN_IDLE_STEPS = 32
"""Evicting what was used a moment ago would make sequences push each other out in turns."""
_COMPARED_AT_ONCE = 64


class UnknownSequenceError(SpecrayError):
    """Fewer than ``base_len`` tokens of the request are held; nothing was changed."""


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One request as an engine sees it.

    ``token_ids[:num_tokens]`` is what the router has told (and the target accepted); behind it lie tokens
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
    scratch: list[EngineSequence] = field(default_factory=list)
    """A draft's alternative continuations; each has its own blocks."""

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose K/V are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    def replace_tail(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Keeps ``base_len`` tokens and appends; equal tokens behind ``base_len`` stay computed.

        A tail that the new tokens only confirm is kept: accepted draft tokens and a draft-ahead chain cost
        nothing again.
        """
        tail = self.token_ids[base_len:]
        num_equal = common_prefix_len(tail, token_ids)
        self.num_tokens = base_len + len(token_ids)
        if num_equal < len(token_ids):
            self.token_ids[base_len + num_equal :] = token_ids[num_equal:]
            self.num_computed_tokens = min(self.num_computed_tokens, base_len + num_equal)

    def set_tail(self, token_ids: Sequence[int]) -> None:
        """Makes ``token_ids`` all that follows what the router has told; equal tokens stay computed."""
        num_tokens = self.num_tokens
        self.replace_tail(num_tokens, token_ids)
        self.truncate(self.num_tokens)
        self.num_tokens = num_tokens

    def accept_tail(self, count: int) -> None:
        """Counts the first ``count`` tokens of the tail as told and forgets the others."""
        self.truncate(self.num_tokens + count)
        self.num_tokens = len(self.token_ids)

    def truncate(self, length: int) -> None:
        """Forgets all tokens from index ``length`` on; their blocks are kept until the next reservation."""
        del self.token_ids[length:]
        self.num_tokens = min(self.num_tokens, length)
        self.num_computed_tokens = min(self.num_computed_tokens, length)

    def recompute_last(self, count: int) -> None:
        """Marks at least the last ``count`` tokens as not computed, so that they give logits again."""
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - count)

    def release(self) -> None:
        """Frees its blocks and those of its scratch sequences; idempotent."""
        self.release_scratch()
        self.truncate(0)
        self.block_table.release()

    def release_scratch(self) -> None:
        """Frees the scratch sequences; idempotent."""
        for sequence in self.scratch:
            sequence.release()
        self.scratch.clear()


class SequenceTable:
    """All sequences of one engine.

    Args:
        allocator: of the block cache.
        max_num_seqs: most requests held at once.
        can_evict: a draft may forget sequences that have long been idle; a target never does.
    """

    def __init__(self, allocator: BlockAllocator, *, max_num_seqs: int, can_evict: bool = False) -> None:
        self._allocator = allocator
        self._max_num_seqs = max_num_seqs
        self._can_evict = can_evict
        self._step = 0
        # Least recently used first.
        self._sequences: OrderedDict[str, EngineSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def begin_step(self) -> None:
        """Counts a step: sequences used from here on are not evicted within it."""
        self._step += 1

    def keep_and_append(
        self,
        request_id: str,
        base_len: int,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        num_extra_tokens: int = 0,
    ) -> EngineSequence:
        """Keeps the first ``base_len`` told tokens, appends ``token_ids``, and makes room.

        Args:
            sampling: needed for a new sequence.
            num_extra_tokens: room to reserve behind the appended tokens.

        Raises:
            UnknownSequenceError: fewer than ``base_len`` tokens are held.
            InvalidRequestError: a new sequence without ``sampling``.
            OutOfBlocksError: no room for its tokens.
            OverloadedError: ``max_num_seqs`` are held.
            All of them before anything of this sequence changed.
        """
        sequence = self._sequences.get(request_id)
        num_held = sequence.num_tokens if sequence is not None else 0
        if base_len > num_held:
            raise UnknownSequenceError(f"{num_held} tokens are held, base_len is {base_len}")
        num_reserved = base_len + len(token_ids) + num_extra_tokens
        if sequence is None:
            sequence = self._new_sequence(request_id, sampling)
        # Before the reservation, which must not evict the sequence that it is for.
        sequence.last_used_step = self._step
        self._reserve(sequence, num_reserved)
        self._sequences[request_id] = sequence
        self._sequences.move_to_end(request_id)
        if sampling is not None:
            sequence.sampling = sampling
        sequence.replace_tail(base_len, token_ids)
        sequence.truncate(num_reserved)
        sequence.block_table.truncate(num_reserved)
        return sequence

    def _reserve(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` tokens, if need be at the cost of idle sequences (draft only).

        Raises:
            OutOfBlocksError: no room; ``sequence`` is unchanged.
        """
        table = sequence.block_table
        while True:
            try:
                table.reserve(num_tokens)
                return
            except OutOfBlocksError:
                if not self._evict_something():
                    raise

    def add_scratch(self, sequence: EngineSequence) -> EngineSequence:
        """A further scratch sequence, empty and without blocks; it is released with ``sequence``."""
        scratch = EngineSequence(sequence.request_id, sequence.sampling, BlockTable(self._allocator))
        sequence.scratch.append(scratch)
        return scratch

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests and frees their blocks; unknown ids are ignored."""
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                sequence.release()

    def check_integrity(self, reserved: Sequence[BlockTable] = ()) -> None:
        """Recomputes the ownership of all blocks from scratch.

        Args:
            reserved: tables of the same allocator that belong to no sequence.

        Raises:
            AssertionError: a block is lost or owned twice, or a sequence's lengths do not fit together.
        """
        sequences = list(self._all_sequences())
        for sequence in sequences:
            lengths = (sequence.num_computed_tokens, sequence.num_tokens, len(sequence.token_ids))
            assert 0 <= sequence.num_computed_tokens <= len(sequence.token_ids), lengths
            assert 0 <= sequence.num_tokens <= len(sequence.token_ids), lengths
            assert sequence.num_computed_tokens <= sequence.block_table.capacity, lengths
        assert len(self._sequences) <= self._max_num_seqs, len(self._sequences)
        self._allocator.check_integrity([*reserved, *(sequence.block_table for sequence in sequences)])

    def _new_sequence(self, request_id: str, sampling: SamplingParams | None) -> EngineSequence:
        if sampling is None:
            raise InvalidRequestError("sampling is missing; it is needed with base_len 0", field="sampling")
        if len(self._sequences) >= self._max_num_seqs and not self._evict_idle():
            raise OverloadedError(f"{self._max_num_seqs} sequences are held (max_num_seqs); none is idle")
        return EngineSequence(request_id, sampling, BlockTable(self._allocator))

    def _evict_something(self) -> bool:
        """Frees blocks: first scratch, which a step fills only after all its sequences have room."""
        for sequence in self._sequences.values():
            if sequence.scratch:
                sequence.release_scratch()
                return True
        return self._evict_idle()

    def _evict_idle(self) -> bool:
        if not self._can_evict or not self._sequences:
            return False
        request_id, sequence = next(iter(self._sequences.items()))
        if self._step - sequence.last_used_step < _MIN_IDLE_STEPS:
            return False
        self.release([request_id])
        return True

    def _all_sequences(self) -> Iterator[EngineSequence]:
        for sequence in self._sequences.values():
            yield sequence
            yield from sequence.scratch


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
