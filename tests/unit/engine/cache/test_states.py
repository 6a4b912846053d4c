"""Which states of recurrent layers are kept of a sequence, and how far it goes back to one of them."""

from __future__ import annotations

import pytest
import torch

from specray.engine.cache.states import LayerState, State, StateCache
from specray.engine.step import SequenceRows

SLOT = 1


def state(value: float) -> State:
    return {0: LayerState({0: torch.tensor([[float(value)]])}, {0: torch.tensor([[float(value)] * 2])})}


def run(states: StateCache, start: int, end: int, *, num_open: int = 0) -> float | None:
    """A step that keeps states worth their length; the value of the state that it went on from."""
    rows = SequenceRows(0, end - start, start, [0], (), SLOT, num_open)
    before = states.state_before(rows)
    states.keep(rows, {length: state(length) for length in {end, max(start + 1, rows.settled)}})
    return None if before is None else float(before[0].conv[0])


def lengths_of(states: StateCache) -> list[int]:
    return sorted({states.resume_len(SLOT, length) for length in range(40)} - {0})


def test_a_chunk_goes_on_from_the_last() -> None:
    states = StateCache(2, 8)
    assert run(states, 0, 10) is None
    assert run(states, 10, 30) == 10
    assert states.resume_len(SLOT, 30) == 30


def test_refused_tokens_lead_back_to_those_before_the_open_ones() -> None:
    states = StateCache(2, 8)
    run(states, 0, 10)
    run(states, 10, 15, num_open=4)
    assert lengths_of(states) == [11, 15]
    assert [states.resume_len(SLOT, length) for length in (15, 14, 11, 10)] == [15, 11, 11, 0]
    assert run(states, 11, 18, num_open=4) == 11
    assert lengths_of(states) == [14, 18]


def test_a_sequence_that_begins_anew_forgets_what_its_slot_held() -> None:
    states = StateCache(2, 8)
    run(states, 0, 10)
    assert run(states, 0, 4) is None
    assert lengths_of(states) == [4]
    states.forget(SLOT)
    assert lengths_of(states) == []


def test_no_state_where_one_is_needed_is_a_bug() -> None:
    states = StateCache(2, 8)
    run(states, 0, 10)
    with pytest.raises(AssertionError, match="no state is kept behind 9 tokens"):
        run(states, 9, 12)


def test_parts_of_joined_states_share_no_memory() -> None:
    both = LayerState.joined([state(1)[0], state(2)[0]])
    one, two = both.parts(2)
    both.conv[0].zero_()
    assert [float(each.conv[0]) for each in (one, two)] == [1, 2]
    assert one.conv[0].untyped_storage().nbytes() == one.conv[0].nbytes
    assert state(1)[0].num_bytes == 12
