"""Keeps each request's tokens and cache blocks on one engine; appends, truncates, releases and evicts.

The table owns *which* sequence holds which blocks; it never touches a tensor. Its one verb is *keep, append*:
keep the first ``base_len`` committed tokens, append more. What others have computed of the same tokens is
found there (``prefix``, ``reuse``), so callers only ever see fewer missing tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.reuse import CopyTokens, SequencePrefix
from specray.engine.cache.state_slots import StateSlots
from specray.engine.sampling.state import CommittedTokens, SamplingState
from specray.errors import OutOfBlocksError, OverloadedError, ProtocolError, SpecrayError
from specray.prefix_keys import UNIT_TOKENS
from specray.types import SamplingParams

_MIN_IDLE_STEPS = 32
"""Steps without use before a sequence may be evicted; fewer would let sequences evict each other in turns."""
_COMPARED_AT_ONCE = 64


class UnknownSequenceError(SpecrayError):
    """Fewer than ``base_len`` tokens of the request are held; nothing was changed."""


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
        if self.prefix is not None:
            self.prefix.publish(self.token_ids, min(self.num_tokens, self.num_computed_tokens))
            self.prefix = None
        self.truncate(0)
        self.block_table.release()


class SequenceTable:
    """All sequences of one engine.

    Args:
        allocator: of the block cache. With an index, computed prefixes are used again.
        max_num_seqs: most requests held at once.
        can_evict: a draft may forget sequences that have long been idle; a target never does.
        copy_tokens: copies K/V between blocks, at once; needed with an index.
        slots: for the states of recurrent layers; None: the model has none.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        can_evict: bool = False,
        copy_tokens: CopyTokens | None = None,
        slots: StateSlots | None = None,
    ) -> None:
        self._slots = slots
        self.num_queried_tokens = 0
        """Committed tokens looked up in the prefix cache since the start."""
        self.num_cached_tokens = 0
        """Committed tokens found in the prefix cache since the start."""
        self._allocator = allocator
        self._copy_tokens = copy_tokens
        self._max_num_seqs = max_num_seqs
        self._can_evict = can_evict
        self._step = 0
        # Least recently used first.
        self.sequences: OrderedDict[str, EngineSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self.sequences)

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
        max_new_tokens: int | None = None,
    ) -> EngineSequence:
        """Keeps the first ``base_len`` committed tokens, appends ``token_ids``, and makes room.

        Tokens that are a known prefix of other sequences come computed, all but the last.

        Args:
            sampling: needed for a new sequence.
            num_extra_tokens: room to reserve after the appended tokens.
            max_new_tokens: the end of ``token_ids`` is left out when more than that many would have to be
                computed; the sequence's ``num_tokens`` is where it was cut.

        Raises:
            UnknownSequenceError: fewer than ``base_len`` tokens are held.
            ProtocolError: a new sequence without ``sampling``.
            OutOfBlocksError: no room for its tokens.
            OverloadedError: ``max_num_seqs`` are held.
            All of them before the tokens of this sequence changed.
        """
        sequence = self.sequences.get(request_id)
        num_held = sequence.num_tokens if sequence is not None else 0
        if base_len > num_held:
            raise UnknownSequenceError(f"{num_held} tokens are held, base_len is {base_len}")
        if sequence is None:
            sequence = self._new_sequence(request_id, sampling)
        # Before the reservation, which must not evict the sequence that it is for.
        sequence.last_used_step = self._step
        token_ids = self._reuse(sequence, base_len, token_ids, num_extra_tokens, max_new_tokens)
        num_reserved = base_len + len(token_ids) + num_extra_tokens
        self._reserve(sequence, num_reserved)
        if self._slots is not None and sequence.state_slot is None:
            sequence.state_slot = self._slots.take()
        self.sequences[request_id] = sequence
        self.sequences.move_to_end(request_id)
        if sampling is not None:
            sequence.set_sampling(sampling)
        sequence.replace_tail(base_len, token_ids)
        sequence.truncate(num_reserved)
        sequence.block_table.truncate(num_reserved)
        prefix = sequence.prefix
        if prefix is not None and sequence.num_cached_tokens:
            sequence.num_computed_tokens = prefix.known_len
        elif prefix is not None and sequence.num_computed_tokens >= prefix.next_len:
            self.publish(sequence)
        return sequence

    def publish(self, sequence: EngineSequence) -> None:
        """Lets others use a sequence's computed tokens but the last, which may be needed for its logits."""
        if sequence.prefix is not None:
            limit = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
            sequence.prefix.publish(sequence.token_ids, limit)

    def _reuse(
        self,
        sequence: EngineSequence,
        base_len: int,
        token_ids: Sequence[int],
        num_extra_tokens: int,
        max_new_tokens: int | None,
    ) -> Sequence[int]:
        """Adopts a known prefix, and withdraws what the sequence had published of tokens that change now.

        Returns:
            ``token_ids``, cut to ``max_new_tokens``.

        Raises:
            OutOfBlocksError: no room.
        """
        prefix = sequence.prefix
        sequence.num_cached_tokens = 0
        last = base_len + len(token_ids) - 1
        is_long = len(token_ids) >= UNIT_TOKENS
        goes_back = prefix is not None and min(base_len, last) < prefix.known_len
        if not (is_long or goes_back or max_new_tokens is not None):
            return token_ids
        start = sequence.num_still_computed(base_len, token_ids)
        if prefix is not None and min(start, last) < prefix.known_len:
            start = sequence.num_computed_tokens = prefix.withdraw(max(0, min(start, last)))
            sequence.num_drafted_for = min(sequence.num_drafted_for, start)
        found = None
        if prefix is not None and is_long:
            told = [*sequence.token_ids[:base_len], *token_ids]
            prefix.publish(told, min(start, last))
            found = prefix.find(told, start, last)
        length = start if found is None else found.length
        if max_new_tokens is not None:
            token_ids = token_ids[: max(0, length + max_new_tokens - base_len)]
        num_told = base_len + len(token_ids)
        if prefix is not None and is_long:
            self.num_queried_tokens += num_told - start
        if prefix is not None and found is not None:
            assert self._copy_tokens is not None, "an index needs copy_tokens"
            prefix.adopt(found, num_told + num_extra_tokens, self._allocate, self._copy_tokens)
            sequence.num_cached_tokens = length - start
            # The block that holds the next token may be another now.
            block_size = self._allocator.block_size
            sequence.num_drafted_for = min(sequence.num_drafted_for, start // block_size * block_size)
            self.num_cached_tokens += length - start
        return token_ids

    def _reserve(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` tokens. Raises OutOfBlocksError; ``sequence`` is unchanged then."""
        block_ids = sequence.block_table.block_ids
        missing = self._allocator.num_blocks_for(num_tokens) - len(block_ids)
        if missing > 0:
            block_ids.extend(self._allocate(missing))

    def _allocate(self, count: int) -> list[int]:
        """Takes blocks, if need be at the cost of idle sequences (draft only). Raises OutOfBlocksError."""
        while True:
            try:
                return self._allocator.allocate(count)
            except OutOfBlocksError:
                if not self._evict_idle():
                    raise

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests and frees their blocks; unknown ids are ignored."""
        for request_id in request_ids:
            sequence = self.sequences.pop(request_id, None)
            if sequence is None:
                continue
            sequence.release()
            if self._slots is not None and sequence.state_slot is not None:
                self._slots.give(sequence.state_slot)

    def check_integrity(self, reserved: Sequence[BlockTable] = ()) -> None:
        """Recomputes the ownership of all blocks from scratch.

        Args:
            reserved: tables of the same allocator that belong to no sequence.

        Raises:
            AssertionError: a block is lost or owned twice, or a sequence's lengths do not fit together.
        """
        sequences = list(self.sequences.values())
        for sequence in sequences:
            lengths = (sequence.num_computed_tokens, sequence.num_tokens, len(sequence.token_ids))
            assert 0 <= sequence.num_computed_tokens <= len(sequence.token_ids), lengths
            assert 0 <= sequence.num_tokens <= len(sequence.token_ids), lengths
            assert sequence.num_computed_tokens <= sequence.block_table.capacity, lengths
            if sequence.prefix is not None:
                sequence.prefix.check_integrity(sequence.token_ids, sequence.num_computed_tokens)
        assert len(self.sequences) <= self._max_num_seqs, len(self.sequences)
        slots = [sequence.state_slot for sequence in sequences if sequence.state_slot is not None]
        assert len(set(slots)) == len(slots), f"sequences share a slot: {sorted(slots)}"
        self._allocator.check_integrity([*reserved, *(sequence.block_table for sequence in sequences)])

    def check_moves(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Checks the slots between which K/V will be moved, as accepted nodes of a tree are.

        Raises:
            AssertionError: some would go to where a sequence has none or others may read, or to two places.
        """
        assert len(sources) == len(destinations) == len(set(destinations)), (sources, destinations)
        size = self._allocator.block_size
        places = {
            block_id: (sequence, number * size)
            for sequence in self.sequences.values()
            for number, block_id in enumerate(sequence.block_table.block_ids)
            if self._allocator.num_owners(block_id) == 1
        }
        for source, destination in zip(sources, destinations, strict=True):
            block, offset = divmod(destination, size)
            assert self._allocator.num_owners(block) < 2, f"K/V would go to block {block}, which is shared"
            if block not in places:
                continue  # Its sequence was released.
            sequence, first = places[block]
            known_len = 0 if sequence.prefix is None else sequence.prefix.known_len
            assert known_len <= first + offset < sequence.num_computed_tokens, (source, destination)
            other, first_read = places.get(source // size, (None, 0))
            assert other is sequence and first_read + source % size > first + offset, (source, destination)

    def _new_sequence(self, request_id: str, sampling: SamplingParams | None) -> EngineSequence:
        if sampling is None:
            raise ProtocolError("sampling is missing; it is needed with base_len 0")
        if len(self.sequences) >= self._max_num_seqs and not self._evict_idle():
            raise OverloadedError(f"{self._max_num_seqs} sequences are held (max_num_seqs); none is idle")
        table = BlockTable(self._allocator)
        # Every row of a prompt with logprobs is computed, so it is no part of the prefix cache.
        shares = self._allocator.index is not None and sampling.num_prompt_logprobs is None
        prefix = SequencePrefix(table, sampling.cache_salt) if shares else None
        return EngineSequence(request_id, sampling, table, prefix=prefix)

    def _evict_idle(self) -> bool:
        if not self._can_evict or not self.sequences:
            return False
        request_id, sequence = next(iter(self.sequences.items()))
        if self._step - sequence.last_used_step < _MIN_IDLE_STEPS:
            return False
        self.release([request_id])
        return True


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
