"""Steps and copies survive the wire, and block tables are said once."""

from __future__ import annotations

import random

import pytest

from specray.engine.group.wire import SentTables, decode_adapter, decode_copy, encode_adapter, encode_copy
from specray.engine.inputs import AdapterInput, CopyInput, SequenceInput
from specray.engine.visibility import Visibility

HEADER_LEN = 11


def row(block_ids: list[int], num_tokens: int = 1) -> SequenceInput:
    return SequenceInput(list(range(num_tokens)), 3, block_ids, 1)


def test_a_step_survives_the_wire() -> None:
    branches = (Visibility(5, 9, 0b11), Visibility(4, 12, 1 << 63 | 0b101))
    inputs = [
        SequenceInput([1, 2, 3], 7, [4, 0], 2),
        SequenceInput([7, 8], 0, [3, 2], 2, branches),
        SequenceInput([9], 0, [1], 0),
        SequenceInput([5, 6], 64, [8], 2, state_slot=3, num_open=1),
        SequenceInput([5, 6, 7], 63, [9], 0, state_slot=2, marks=((64, 5), (65, 0))),
        SequenceInput([5], 64, [9], 1, adapter_slot=2),
    ]
    assert SentTables().decode(SentTables().encode(inputs)) == inputs
    assert SentTables().decode([]) == []


@pytest.mark.parametrize(
    "work",
    [AdapterInput("sql-é", bytes(range(32))), AdapterInput(slot=3), AdapterInput(slot=0, is_cleared=True)],
)
def test_what_is_done_with_adapters_survives_the_wire(work: AdapterInput) -> None:
    assert decode_adapter(encode_adapter(work)) == work


def test_a_copy_survives_the_wire() -> None:
    copy = CopyInput([3, 1], [4, 0, 2], 5, 30)
    assert decode_copy(encode_copy(copy)) == copy


@pytest.mark.parametrize(
    ("table", "num_new"),
    [
        (list(range(100)), 0),
        ([*range(100), 200], 1),
        ([*range(100), 200, 201], 2),
        (list(range(60)), 0),
        ([*range(60), 300], 1),
        ([0, 1, 2, 300], 1),
        ([400], 1),
        ([500, 501], 0),
    ],
)
def test_only_new_blocks_are_sent(table: list[int], num_new: int) -> None:
    leader, follower = SentTables(), SentTables()
    first = [row([500, 501]), row(list(range(100)))]
    assert follower.decode(leader.encode(first)) == first
    # Another order, and a sequence less.
    encoded = leader.encode([row(table)])
    assert len(encoded) == HEADER_LEN + 1 + num_new
    assert follower.decode(encoded) == [row(table)]


def test_sequences_of_one_prefix_are_told_apart_by_their_last_blocks() -> None:
    leader, follower = SentTables(), SentTables()
    tables = [[*range(50), 100 + index] for index in range(4)]
    follower.decode(leader.encode([row(table) for table in tables]))
    grown = [[*table, 200 + index] for index, table in enumerate(reversed(tables))]
    encoded = leader.encode([row(table) for table in grown])
    assert len(encoded) == 4 * (HEADER_LEN + 1 + 1)
    assert follower.decode(encoded) == [row(table) for table in grown]


def test_a_table_that_grows_in_place_is_not_taken_for_what_was_sent() -> None:
    leader, follower = SentTables(), SentTables()
    table = [3, 4]
    follower.decode(leader.encode([row(table)]))
    table.append(9)
    assert [list(item.block_ids) for item in follower.decode(leader.encode([row(table)]))] == [[3, 4, 9]]


def test_random_steps_are_decoded_as_they_were_encoded() -> None:
    source = random.Random(0)
    leader, follower = SentTables(), SentTables()
    tables: list[list[int]] = [[source.randrange(30)] for _ in range(6)]
    for _ in range(300):
        table = source.choice(tables)
        if source.random() < 0.5:
            table.append(source.randrange(30))
        elif len(table) > 1:
            del table[source.randrange(1, len(table)) :]
        inputs = [row(own, source.randint(1, 3)) for own in source.sample(tables, source.randint(1, 6))]
        assert follower.decode(leader.encode(inputs)) == inputs
