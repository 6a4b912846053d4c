"""Slots of states: who has which, and after how many tokens their sequences can go on."""

from __future__ import annotations

import pytest
import torch

from specray.engine.cache.state_pool import StatePool
from specray.engine.cache.state_slots import StateSlots
from specray.engine.step import SequenceRows, StateShape

SHAPE = StateShape(2, 1, 8, 8, 1, 16, 4)


def make_pool() -> StatePool:
    device = torch.device("cpu")
    return StatePool([SHAPE], num_slots=2, max_open=4, dtype=torch.bfloat16, device=device)


def rows_of(start: int, end: int, num_open: int, *, slot: int = 0) -> SequenceRows:
    return SequenceRows(0, end - start, start, [0], (), slot, num_open)


def test_slots_are_handed_out_again_and_begin_anew() -> None:
    slots = StateSlots(2, 4)
    assert (slots.take(), slots.take(), slots.num_used) == (0, 1, 2)
    slots.begin([rows_of(0, 5, 1)])
    slots.finish([rows_of(0, 5, 1)])
    assert slots.resume_len(0, 5) == 5
    slots.give(0)
    assert slots.take() == 0 and slots.resume_len(0, 5) == 0
    with pytest.raises(AssertionError, match="slot 1 is not in use"):
        slots.give(1)
        slots.give(1)
    slots.clear()
    assert slots.num_used == 0


def test_a_sequence_goes_on_after_any_open_row_and_before_the_first() -> None:
    slots = StateSlots(1, 4)
    slots.begin([rows_of(0, 10, 3)])
    slots.finish([rows_of(0, 10, 3)])
    assert [slots.resume_len(0, length) for length in (6, 7, 8, 10, 12)] == [0, 7, 8, 10, 10]
    assert slots.begin([rows_of(8, 12, 4)]) == [7]


def test_a_step_that_fails_lets_its_sequences_begin_anew() -> None:
    pool = make_pool()
    for start, end in ((0, 5), (5, 6)):
        with pool.step([rows_of(start, end, 1), rows_of(start, end, 1, slot=1)]):
            pass
    with pytest.raises(ZeroDivisionError), pool.step([rows_of(6, 7, 1)]):
        raise ZeroDivisionError
    assert [pool.resume_len(slot, 6) for slot in (0, 1)] == [0, 6]


def test_the_table_says_what_a_step_does() -> None:
    """A prompt's rows go into the state but for its last ones; records that stay do so before a verify."""
    pool = make_pool()
    with pool.step([rows_of(0, 5, 4)]):
        assert pool.table.tolist() == [[0, 0, 0, 1, 1, 4], [0] * 6] and pool.has_settled_rows
    verify = SequenceRows(0, 2, 3, [0], (), 0, 2)
    with pool.step([verify, SequenceRows(2, 1, 0, [1], (), 1, 1)]):
        assert pool.table.tolist() == [[0, 1, 3, 3, 0, 2], [1, 0, 0, 0, 2, 1]]
        assert not pool.has_settled_rows


def test_eight_open_rows_take_a_tenth_of_a_state() -> None:
    """Of a model of 27B: one state of a layer is 3 MiB, and records are float32 as it is."""
    shape = StateShape(48, 16, 128, 128, 1, 2 * 2048 + 6144, 4)
    plain = 4 * shape.num_state_numbers
    assert plain == 3 << 20
    assert 1.08 < shape.num_bytes(8, 2) / plain < 1.16
    pool = make_pool()
    layer = pool.layers[0]
    tensors = (layer.states, layer.updates, layer.decays, layer.keys, layer.inputs)
    assert sum(each[0].nbytes for each in tensors) == SHAPE.num_bytes(4, 2)
