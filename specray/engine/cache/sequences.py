"""Keeps each request's tokens and cache blocks on one engine; appends, truncates, releases and evicts.

The table owns *which* sequence holds which blocks; it never touches a tensor. Its one verb is *keep, append*:
keep the first ``base_len`` committed tokens, append more. What others have computed of the same tokens is
found there (``prefix``, ``reuse``), so callers only ever see fewer missing tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from specray.engine.cache.adapters import LoadedAdapters
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.reuse import CopyTokens, SequencePrefix
from specray.engine.cache.sequence import EngineSequence
from specray.engine.cache.snapshots import SequenceSnapshots, Snapshots
from specray.engine.cache.state_slots import StateSlots
from specray.engine.inputs import StateCopy
from specray.errors import OutOfBlocksError, OverloadedError, ProtocolError, SpecrayError
from specray.prefix_keys import UNIT_TOKENS, root_key
from specray.types import SamplingParams

_MIN_IDLE_STEPS = 32
"""Steps without use before a sequence may be evicted; fewer would let sequences evict each other in turns."""


class UnknownSequenceError(SpecrayError):
    """Fewer than ``base_len`` tokens of the request are held; nothing was changed."""


class SequenceTable:
    """All sequences of one engine.

    Args:
        allocator: of the block cache. With an index, computed prefixes are used again.
        max_num_seqs: most requests held at once.
        can_evict: a draft may forget sequences that have long been idle; a target never does.
        copy_tokens: copies K/V between blocks, at once; needed with an index.
        slots: for the states of recurrent layers; None: the model has none.
        copy_state: copies a state to or from a snapshot, at once; needed with an index and slots.
        prompts_only: what was computed behind a prompt's end is not used again.
        adapters: that sequences may use; None: sequences are told of them, and go without.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        can_evict: bool = False,
        copy_tokens: CopyTokens | None = None,
        slots: StateSlots | None = None,
        copy_state: Callable[[StateCopy], None] | None = None,
        prompts_only: bool = False,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._slots, self._adapters = slots, adapters
        self.snapshots: Snapshots | None = None
        """States kept for other sequences; None: there are no states, or nothing is used again."""
        if slots is not None and allocator.index is not None:
            self.snapshots = Snapshots(slots.num_snapshots, allocator.index)
        self._copy_state = copy_state
        self._prompts_only = prompts_only
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
        is_new = sequence is None
        if sequence is None:
            sequence = self._new_sequence(request_id, sampling)
        elif sampling is not None and sampling.adapter != sequence.sampling.adapter:
            raise ProtocolError("sampling.adapter is another than the sequence began with; allowed: the same")
        # Before the reservation, which must not evict the sequence that it is for.
        sequence.last_used_step = self._step
        token_ids = self._reuse(sequence, base_len, token_ids, num_extra_tokens, max_new_tokens)
        num_reserved = base_len + len(token_ids) + num_extra_tokens
        self._reserve(sequence, num_reserved)
        if self._slots is not None and sequence.state_slot is None:
            sequence.state_slot = self._slots.take()
        if is_new and self._adapters is not None and sequence.sampling.adapter:
            sequence.adapter_slot = self._adapters.use(sequence.sampling.adapter)
        self._restore_state(sequence)
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
            self._publish(sequence, sequence.token_ids, sequence.num_tokens - 1)

    def _publish(self, sequence: EngineSequence, token_ids: Sequence[int], limit: int) -> None:
        prefix, own = sequence.prefix, sequence.snapshots
        assert prefix is not None, "only a sequence with a prefix publishes it"
        limit = min(limit, sequence.num_computed_tokens)
        if self._prompts_only:
            limit = min(limit, sequence.sampling.num_prompt_tokens - 1)
        prefix.publish(token_ids, limit)
        if own is None or sequence.state_slot is None:
            return
        assert self._slots is not None and self._copy_state is not None, "snapshots need states"
        base = self._slots.bases[sequence.state_slot]
        if (kept := own.settle(base)) is not None:
            num_tokens, index = kept
            self._copy_state(StateCopy(sequence.state_slot, index, num_tokens, base))

    def _restore_state(self, sequence: EngineSequence) -> None:
        """Puts the snapshot from which a sequence goes on into its slot."""
        own, slot = sequence.snapshots, sequence.state_slot
        if own is None or own.found is None or slot is None:
            return
        assert self._copy_state is not None, "snapshots need states"
        found, own.found = own.found, None
        self._copy_state(StateCopy(slot, found.index, found.num_tokens))

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
        prefix, own = sequence.prefix, sequence.snapshots
        sequence.num_cached_tokens = 0
        last = base_len + len(token_ids) - 1
        is_long = len(token_ids) >= UNIT_TOKENS
        start = sequence.num_still_computed(base_len, token_ids)
        if own is not None and self._slots is not None and sequence.state_slot is not None:
            start = self._slots.resume_len(sequence.state_slot, min(start, last))
        goes_back = prefix is not None and min(start, last) < prefix.known_len
        if not (is_long or goes_back or max_new_tokens is not None):
            return token_ids
        if prefix is not None and goes_back:
            # Without its state, a sequence goes on from a snapshot as a new one does.
            start = prefix.withdraw(max(0, min(start, last))) if own is None else prefix.leave()
            sequence.num_computed_tokens = start
            sequence.num_drafted_for = min(sequence.num_drafted_for, start)
        found = None
        is_sought = is_long or (own is not None and goes_back)
        if prefix is not None and is_sought:
            told = [*sequence.token_ids[:base_len], *token_ids]
            self._publish(sequence, told, min(start, last))
            found = prefix.find(told, start, last)
            if own is not None:
                found = own.resume(found, start)
        length = start if found is None else found.length
        if max_new_tokens is not None:
            token_ids = token_ids[: max(0, length + max_new_tokens - base_len)]
        num_told = base_len + len(token_ids)
        if prefix is not None and is_sought:
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
            if sequence.prefix is not None:
                self._publish(sequence, sequence.token_ids, sequence.num_tokens)
            sequence.release()
            if self._slots is not None and sequence.state_slot is not None:
                self._slots.give(sequence.state_slot)
            if self._adapters is not None and sequence.adapter_slot >= 0:
                self._adapters.end_use(sequence.sampling.adapter)

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
        if self.snapshots is not None and self._slots is not None:
            marks = [
                mark.index
                for each in sequences
                if each.snapshots is not None
                for mark in each.snapshots.marks
            ]
            self.snapshots.check_integrity(marks, self._slots.num_snapshots)
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
        if self._adapters is not None and sampling.adapter:
            self._adapters.check(sampling.adapter)
        if len(self.sequences) >= self._max_num_seqs and not self._evict_idle():
            raise OverloadedError(f"{self._max_num_seqs} sequences are held (max_num_seqs); none is idle")
        table = BlockTable(self._allocator)
        # Every row of a prompt with logprobs is computed, so it is no part of the prefix cache.
        shares = self._allocator.index is not None and sampling.num_prompt_logprobs is None
        root = root_key(sampling.cache_salt, adapter=sampling.adapter)
        prefix = SequencePrefix(table, root) if shares else None
        sequence = EngineSequence(request_id, sampling, table, prefix=prefix)
        if prefix is not None and self.snapshots is not None:
            keeps_outputs = not self._prompts_only
            sequence.snapshots = SequenceSnapshots(
                self.snapshots, prefix, sampling, keeps_outputs=keeps_outputs
            )
        return sequence

    def _evict_idle(self) -> bool:
        if not self._can_evict or not self.sequences:
            return False
        request_id, sequence = next(iter(self.sequences.items()))
        if self._step - sequence.last_used_step < _MIN_IDLE_STEPS:
            return False
        self.release([request_id])
        return True
