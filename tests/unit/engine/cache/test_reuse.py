"""What sequences take from each other: the right tokens at the right place, and nothing is lost.

The cache here is a list that holds, for every slot, the whole prefix that its token was computed from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.engine.cache.blocks import BlockAllocator
from specray.engine.cache.prefix import PrefixIndex
from specray.engine.cache.sequence import EngineSequence
from specray.engine.cache.sequences import SequenceTable, UnknownSequenceError
from specray.errors import OutOfBlocksError, OverloadedError
from specray.types import SamplingParams

SAMPLING = SamplingParams()
SHARED = list(range(1000, 1100))


class Engine:
    """A sequence table over slots that remember what was computed into them."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int = 8, can_evict: bool = False
    ) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, block_size, index=PrefixIndex(block_size))
        self.table = SequenceTable(
            self.allocator, max_num_seqs=max_num_seqs, can_evict=can_evict, copy_tokens=self._copy
        )
        self.slots: list[tuple[int, ...]] = [()] * (num_blocks * block_size)
        self.num_copied = 0
        self.num_computed = 0

    def append(
        self, request_id: str, base_len: int, token_ids: Sequence[int], **options: int
    ) -> EngineSequence:
        """One item of a request, computed; what the engine relied on must be there."""
        sequence = self.table.keep_and_append(request_id, base_len, token_ids, SAMPLING, **options)
        self.compute(sequence)
        return sequence

    def compute(self, sequence: EngineSequence) -> None:
        self.check(sequence)
        tokens, block_ids = sequence.token_ids, sequence.block_table.block_ids
        for position in range(sequence.num_computed_tokens, len(tokens)):
            self.slots[self._slot(block_ids, position)] = tuple(tokens[: position + 1])
            self.num_computed += 1
        sequence.num_computed_tokens = len(tokens)

    def check(self, sequence: EngineSequence) -> None:
        for position in range(sequence.num_computed_tokens):
            held = self.slots[self._slot(sequence.block_table.block_ids, position)]
            assert held == tuple(sequence.token_ids[: position + 1]), position

    def _copy(
        self, source: Sequence[int], destination: Sequence[int], num_tokens: int, *, first: int = 0
    ) -> None:
        assert 0 <= first < num_tokens
        self.num_copied += num_tokens - first
        for position in range(first, num_tokens):
            self.slots[self._slot(destination, position)] = self.slots[self._slot(source, position)]

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return block_ids[block] * self.block_size + offset


def test_a_running_sequences_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    engine = Engine(num_blocks=8, block_size=32)
    first = engine.append("a", 0, SHARED[:81])
    engine.table.publish(first)
    second = engine.append("b", 0, [*SHARED[:81], 8, 9])
    assert second.num_cached_tokens == 80
    assert second.block_table.block_ids[:2] == first.block_table.block_ids[:2]
    assert second.block_table.block_ids[2] != first.block_table.block_ids[2]
    assert engine.num_copied == 16
    engine.table.check_integrity()


def test_a_released_sequence_is_taken_over_by_the_one_that_goes_on() -> None:
    """A block for a whole sequence, as on CPU: the next turn of a conversation costs no copy."""
    engine = Engine(num_blocks=3, block_size=128)
    first = engine.append("a", 0, SHARED[:50])
    block_ids = list(first.block_table.block_ids)
    engine.table.release(["a"])
    assert engine.allocator.num_free == 3
    second = engine.append("b", 0, SHARED[:90])
    assert (second.num_cached_tokens, engine.num_copied) == (48, 0)
    assert second.block_table.block_ids == block_ids
    assert engine.num_computed == 50 + 42


def test_a_released_sequence_that_holds_more_is_copied_and_stays() -> None:
    engine = Engine(num_blocks=3, block_size=128)
    engine.append("a", 0, SHARED[:64])
    engine.table.release(["a"])
    other = engine.append("b", 0, [*SHARED[:32], *range(20)])
    assert (other.num_cached_tokens, engine.num_copied) == (32, 32)
    again = engine.append("c", 0, [*SHARED[:64], 5])
    assert again.num_cached_tokens == 64


def test_the_last_block_left_is_taken_over_though_it_holds_more() -> None:
    engine = Engine(num_blocks=1, block_size=128)
    engine.append("a", 0, SHARED[:64])
    engine.table.release(["a"])
    other = engine.append("b", 0, [*SHARED[:32], *range(20)])
    assert (other.num_cached_tokens, engine.num_copied) == (32, 0)
    engine.table.release(["b"])
    # What the first had behind it is gone, and nobody finds it.
    assert engine.append("c", 0, [*SHARED[:64], 5]).num_cached_tokens == 32


def test_a_failed_adoption_leaves_what_it_wanted() -> None:
    engine = Engine(num_blocks=5, block_size=16)
    engine.append("a", 0, SHARED[:33])
    engine.table.release(["a"])
    with pytest.raises(OutOfBlocksError):
        engine.append("b", 0, [*SHARED[:32], *range(60)])
    engine.table.check_integrity()
    assert (len(engine.table), engine.allocator.num_free) == (0, 5)
    assert engine.append("b", 0, [*SHARED[:32], *range(40)]).num_cached_tokens == 32


def test_the_last_token_is_always_computed() -> None:
    engine = Engine(num_blocks=8, block_size=16)
    engine.append("a", 0, SHARED[:64])
    engine.table.release(["a"])
    assert engine.append("b", 0, SHARED[:64]).num_cached_tokens == 48
    assert engine.append("c", 0, SHARED[:65]).num_cached_tokens == 64


def test_a_running_sequence_finds_what_others_computed_since() -> None:
    """Two prompts prefilled in chunks: the second joins the first as soon as that is ahead."""
    engine = Engine(num_blocks=4, block_size=128)
    engine.append("a", 0, SHARED[:40])
    second = engine.append("b", 0, SHARED[:20])
    assert second.num_cached_tokens == 0
    engine.append("a", 40, SHARED[40:90])
    engine.append("a", 90, [1])
    second = engine.append("b", 20, SHARED[20:70])
    assert (second.num_cached_tokens, engine.num_copied) == (64 - 20, 44)


def test_going_back_in_a_shared_block_leaves_it_to_the_others() -> None:
    engine = Engine(num_blocks=8, block_size=16)
    first = engine.append("a", 0, SHARED[:49])
    engine.table.publish(first)
    second = engine.append("b", 0, [*SHARED[:48], 1])
    shared = second.block_table.block_ids[:3]
    changed = engine.append("a", 20, [1, 2, 3])
    assert changed.block_table.block_ids[0] == shared[0]
    assert changed.block_table.block_ids[1] not in shared
    engine.check(second)
    engine.table.check_integrity()


def test_going_back_in_an_own_block_withdraws_what_was_published() -> None:
    engine = Engine(num_blocks=3, block_size=128)
    first = engine.append("a", 0, SHARED[:65])
    engine.table.publish(first)
    engine.append("a", 40, [1, 2, 3])
    assert engine.append("b", 0, SHARED[:65]).num_cached_tokens == 32
    engine.table.check_integrity()


def test_draft_tokens_are_nobodys_prefix() -> None:
    engine = Engine(num_blocks=4, block_size=64)
    sequence = engine.append("a", 0, SHARED[:20], num_extra_tokens=30)
    sequence.set_tail(SHARED[20:50])
    engine.compute(sequence)
    engine.table.publish(sequence)
    assert engine.append("b", 0, SHARED[:60]).num_cached_tokens == 16
    sequence.accept_tail(30)
    engine.table.publish(sequence)
    assert engine.append("c", 0, SHARED[:60]).num_cached_tokens == 48


def test_least_recently_used_content_goes_first_and_blank_blocks_before_it() -> None:
    engine = Engine(num_blocks=3, block_size=64)
    for request_id, first in (("a", 0), ("b", 100), ("c", 200)):
        engine.append(request_id, 0, range(first, first + 33))
        engine.table.release([request_id])
    engine.append("a2", 0, range(33))
    engine.table.release(["a2"])
    engine.append("new", 0, range(300, 333))
    assert engine.append("c2", 0, range(200, 233)).num_cached_tokens == 32
    assert engine.append("a3", 0, range(33)).num_cached_tokens == 32
    with pytest.raises(OutOfBlocksError):
        engine.append("b2", 0, range(100, 133))


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning() -> None:
    engine = Engine(num_blocks=4, block_size=16)
    engine.append("a", 0, SHARED[:64])
    engine.table.release(["a"])
    engine.append("b", 0, range(20))
    assert engine.append("c", 0, [*SHARED[:20]]).num_cached_tokens == 16


def test_what_is_cached_does_not_count_against_a_chunk() -> None:
    engine = Engine(num_blocks=8, block_size=64)
    engine.append("a", 0, SHARED[:64])
    engine.table.release(["a"])
    sequence = engine.append("b", 0, SHARED[:100], max_new_tokens=10)
    assert (sequence.num_cached_tokens, sequence.num_tokens) == (64, 74)
    sequence = engine.append("b", 74, SHARED[74:100], max_new_tokens=10)
    assert (sequence.num_cached_tokens, sequence.num_tokens) == (0, 84)
    # The same item again computes nothing twice.
    before = engine.num_computed
    sequence = engine.append("b", 0, SHARED[:100], max_new_tokens=10)
    assert (sequence.num_tokens, engine.num_computed - before) == (94, 10)


def test_queries_and_hits_count_tokens() -> None:
    engine = Engine(num_blocks=8, block_size=64)
    engine.append("a", 0, SHARED[:64])
    engine.table.release(["a"])
    engine.append("b", 0, [*SHARED[:50], 1])
    engine.append("b", 51, [2])
    assert (engine.table.num_queried_tokens, engine.table.num_cached_tokens) == (64 + 51, 48)


class Operation(NamedTuple):
    verb: str
    request_id: str
    position: int
    token_ids: list[int]
    limit: int | None


# Few beginnings, so that prefixes are shared, part at any place, and meet again.
tokens = st.builds(
    lambda beginning, length, end: ([beginning] * 80)[:length] + end,
    st.integers(0, 1),
    st.sampled_from([0, 1, 15, 16, 17, 32, 40, 47, 64, 80]),
    st.lists(st.integers(0, 2), max_size=20),
)
operations = st.lists(
    st.builds(
        Operation,
        st.sampled_from(["new", "new", "append", "append", "back", "tail", "release", "room", "step"]),
        st.sampled_from("abcde"),
        st.integers(0, 90),
        tokens,
        st.one_of(st.none(), st.integers(1, 20)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from([1, 5, 16, 24, 40, 128]), st.booleans())
def test_every_token_is_computed_from_its_own_prefix(
    steps: list[Operation], block_size: int, can_evict: bool
) -> None:
    num_blocks = max(3, 400 // block_size)
    engine = Engine(num_blocks=num_blocks, block_size=block_size, max_num_seqs=4, can_evict=can_evict)
    held: dict[str, EngineSequence] = {}
    for step in steps:
        apply(engine, held, step)
        engine.table.check_integrity()
        for request_id, sequence in list(held.items()):
            if sequence is not engine.table.sequences.get(request_id):
                del held[request_id]  # evicted
                continue
            engine.check(sequence)
            assert sequence.prefix is not None
            assert sequence.prefix.known_len <= sequence.num_tokens
    engine.table.release(list("abcde"))
    engine.table.check_integrity()
    assert engine.allocator.num_free == num_blocks


def apply(engine: Engine, held: dict[str, EngineSequence], step: Operation) -> None:
    sequence = held.get(step.request_id)
    match step.verb:
        case "new" | "append" | "back":
            num_held = sequence.num_tokens if sequence is not None else 0
            base_len = {"new": 0, "append": num_held, "back": min(step.position, num_held)}[step.verb]
            options = {} if step.limit is None else {"max_new_tokens": step.limit}
            before = list(sequence.token_ids[:base_len]) if sequence is not None else []
            try:
                sequence = engine.append(step.request_id, base_len, step.token_ids, **options)
            except (OutOfBlocksError, OverloadedError, UnknownSequenceError):
                return
            held[step.request_id] = sequence
            told = [*before, *step.token_ids]
            assert sequence.token_ids[: sequence.num_tokens] == told[: sequence.num_tokens]
            assert sequence.num_tokens == len(told) or step.limit is not None
        case "tail" if sequence is not None and sequence.block_table.block_ids:
            room = sequence.block_table.capacity - sequence.num_tokens
            sequence.set_tail(step.token_ids[:room])
            engine.compute(sequence)
            sequence.accept_tail(min(step.position, len(sequence.token_ids) - sequence.num_tokens))
        case "release":
            engine.table.release([step.request_id])
            held.pop(step.request_id, None)
        case "room" if sequence is not None:
            with contextlib.suppress(OutOfBlocksError):
                sequence.block_table.reserve(step.position)
        case "step":
            for _ in range(step.position):
                engine.table.begin_step()
