"""Sequences and their blocks: keep, append, and what stays computed; integrity after every operation."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.engine.cache.blocks import BlockAllocator
from specray.engine.cache.sequence import EngineSequence, common_prefix_len
from specray.engine.cache.sequences import SequenceTable, UnknownSequenceError
from specray.errors import OutOfBlocksError, OverloadedError, ProtocolError
from specray.types import SamplingParams

SAMPLING = SamplingParams()


def make_table(
    *, num_blocks: int = 16, block_size: int = 4, max_num_seqs: int = 3, can_evict: bool = False
) -> tuple[SequenceTable, BlockAllocator]:
    allocator = BlockAllocator(num_blocks, block_size)
    return SequenceTable(allocator, max_num_seqs=max_num_seqs, can_evict=can_evict), allocator


def computed(table: SequenceTable, tokens: list[int], *, request_id: str = "a") -> EngineSequence:
    sequence = table.keep_and_append(request_id, 0, tokens, SAMPLING)
    sequence.num_computed_tokens = len(tokens)
    return sequence


def test_accepted_draft_tokens_stay_computed() -> None:
    table, _ = make_table()
    sequence = computed(table, [1, 2, 3])
    table.keep_and_append("a", 3, [], num_extra_tokens=3)
    sequence.set_tail([7, 8, 9])
    sequence.num_computed_tokens = 6
    sequence.accept_tail(2)
    table.keep_and_append("a", 3, [7, 8, 5])
    assert (sequence.token_ids, sequence.num_computed_tokens) == ([1, 2, 3, 7, 8, 5], 5)


def test_confirmed_tail_keeps_what_follows_it() -> None:
    """A draft-ahead chain: the committed tokens are its beginning, and its rest is still wanted."""
    table, _ = make_table()
    sequence = computed(table, [1, 2])
    sequence.token_ids += [3, 4, 5, 6]
    sequence.num_computed_tokens = 5
    table.keep_and_append("a", 2, [3, 4], num_extra_tokens=2)
    assert (sequence.num_tokens, sequence.token_ids) == (4, [1, 2, 3, 4, 5, 6])
    assert sequence.num_computed_tokens == 5


def test_contradicted_tail_is_forgotten_from_the_first_difference() -> None:
    table, _ = make_table()
    sequence = computed(table, [1, 2])
    sequence.token_ids += [3, 4, 5]
    sequence.num_computed_tokens = 5
    table.keep_and_append("a", 2, [3, 9])
    assert (sequence.token_ids, sequence.num_computed_tokens) == ([1, 2, 3, 9], 3)


def test_rollback_lowers_a_number_and_frees_whole_tail_blocks() -> None:
    table, allocator = make_table(num_blocks=4, block_size=4)
    sequence = computed(table, list(range(13)))
    assert allocator.num_free == 0
    table.keep_and_append("a", 5, [])
    assert (sequence.num_tokens, sequence.num_computed_tokens, allocator.num_free) == (5, 5, 2)


def test_recovery_with_the_same_tokens_costs_nothing() -> None:
    table, _ = make_table()
    sequence = computed(table, [1, 2, 3, 4, 5])
    table.keep_and_append("a", 0, [1, 2, 3, 4, 5], SAMPLING)
    assert sequence.num_missing_tokens == 0


def test_base_len_beyond_what_the_router_told_is_unknown() -> None:
    """Tokens that only the engine put there do not count."""
    table, _ = make_table()
    sequence = computed(table, [1, 2, 3])
    sequence.token_ids += [4, 5]
    with pytest.raises(UnknownSequenceError):
        table.keep_and_append("a", 4, [6])
    with pytest.raises(UnknownSequenceError):
        table.keep_and_append("b", 1, [6], SAMPLING)
    assert (sequence.num_tokens, sequence.token_ids) == (3, [1, 2, 3, 4, 5])


def test_new_sequence_needs_sampling_params() -> None:
    table, allocator = make_table()
    with pytest.raises(ProtocolError, match="sampling"):
        table.keep_and_append("a", 0, [1])
    assert (len(table), allocator.num_free) == (0, 16)


def test_no_room_changes_nothing() -> None:
    table, allocator = make_table(num_blocks=3, block_size=4)
    sequence = computed(table, [1] * 9)
    with pytest.raises(OutOfBlocksError):
        table.keep_and_append("a", 2, [5] * 11)
    with pytest.raises(OutOfBlocksError):
        table.keep_and_append("b", 0, [5], SAMPLING)
    assert (sequence.token_ids, sequence.num_computed_tokens) == ([1] * 9, 9)
    assert (len(table), allocator.num_free) == (1, 0)
    table.check_integrity()


def test_max_num_seqs() -> None:
    table, _ = make_table(max_num_seqs=1)
    computed(table, [1])
    with pytest.raises(OverloadedError, match="max_num_seqs"):
        computed(table, [1], request_id="b")
    table.release(["a", "never seen"])
    computed(table, [1], request_id="b")


def test_only_long_idle_sequences_are_evicted() -> None:
    table, allocator = make_table(num_blocks=4, block_size=4, can_evict=True)
    computed(table, [1] * 8, request_id="idle")
    for _ in range(32):
        with pytest.raises(OutOfBlocksError):
            table.keep_and_append("busy", 0, [2] * 12, SAMPLING)
        table.begin_step()
    assert table.keep_and_append("busy", 0, [2] * 12, SAMPLING).num_tokens == 12
    assert allocator.num_free == 1
    with pytest.raises(UnknownSequenceError):
        table.keep_and_append("idle", 8, [1])


def test_target_never_evicts() -> None:
    table, _ = make_table(num_blocks=2, block_size=4)
    computed(table, [1] * 8)
    for _ in range(100):
        table.begin_step()
    with pytest.raises(OutOfBlocksError):
        computed(table, [1], request_id="b")


def test_returning_idle_sequence_does_not_evict_itself() -> None:
    table, _ = make_table(num_blocks=2, block_size=4, can_evict=True)
    computed(table, [1] * 8)
    for _ in range(100):
        table.begin_step()
    with pytest.raises(OutOfBlocksError):
        table.keep_and_append("a", 8, [1])
    assert len(table) == 1
    table.check_integrity()


@given(
    st.lists(st.integers(0, 2), max_size=300),
    st.lists(st.integers(0, 2), max_size=300),
    st.integers(0, 300),
)
def test_common_prefix_len(first: list[int], second: list[int], shared: int) -> None:
    second = first[:shared] + second
    expected = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    assert common_prefix_len(first, second) == expected


operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "release", "tail", "room", "step"]),
        st.sampled_from("abcde"),
        st.integers(0, 12),
        st.lists(st.integers(0, 2), max_size=9),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(operations, st.booleans())
def test_blocks_are_never_lost_or_shared(
    steps: list[tuple[str, str, int, list[int]]], can_evict: bool
) -> None:
    table, allocator = make_table(num_blocks=10, block_size=3, can_evict=can_evict)
    told: dict[str, list[int]] = {}
    held: dict[str, EngineSequence] = {}
    for operation, request_id, base_len, tokens in steps:
        if operation == "append":
            try:
                sequence = table.keep_and_append(
                    request_id, base_len, tokens, SAMPLING, num_extra_tokens=len(tokens)
                )
            except UnknownSequenceError:
                assert base_len > len(told.get(request_id, [])) or can_evict
            except (OutOfBlocksError, OverloadedError):
                pass
            else:
                told[request_id] = told.get(request_id, [])[:base_len] + tokens
                held[request_id] = sequence
                assert sequence.token_ids[: sequence.num_tokens] == told[request_id]
                sequence.num_computed_tokens = len(sequence.token_ids)
        elif operation == "release":
            table.release([request_id])
            told.pop(request_id, None)
            held.pop(request_id, None)
        elif operation == "tail" and request_id in held and held[request_id].block_table.block_ids:
            sequence = held[request_id]
            room = sequence.block_table.capacity - sequence.num_tokens
            sequence.set_tail(tokens[:room])
            sequence.accept_tail(base_len)
            told[request_id] = list(sequence.token_ids)
        elif operation == "room" and request_id in held and held[request_id].block_table.block_ids:
            with contextlib.suppress(OutOfBlocksError):
                held[request_id].block_table.reserve(base_len)
        elif operation == "step":
            table.begin_step()
        table.check_integrity()
    table.release(list("abcde"))
    assert allocator.num_free == 10
