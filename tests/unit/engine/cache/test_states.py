"""Which states of recurrent layers are kept of a sequence, and how far it goes back to one of them."""

from __future__ import annotations

import pytest
import torch

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.states import LayerState, State, StateCache
from specray.engine.step import SequenceRows

BLOCK = 7


def state(value: float) -> State:
    return {0: LayerState({0: torch.tensor([[float(value)]])}, {0: torch.tensor([[float(value)] * 2])})}


def run(
    states: StateCache, start: int, end: int, *, settled_len: int | None = None, block: int = BLOCK
) -> float | None:
    """A step that keeps states worth their length; the value of the state that it went on from."""
    rows = SequenceRows(0, end - start, start, [block], settled_len=settled_len)
    before = states.begin(rows)
    lengths = {end, min(max(start + 1, rows.num_settled), end)}
    states.keep(rows, {length: state(length) for length in lengths})
    return None if before is None else float(before[0].conv[0])


def test_a_chunk_goes_on_from_the_last() -> None:
    states = StateCache()
    assert run(states, 0, 10) is None
    assert run(states, 10, 30) == 10
    assert states.resume_len([BLOCK], 30) == 30


def test_refused_tokens_lead_back_to_the_settled_ones() -> None:
    states = StateCache()
    run(states, 0, 10)
    run(states, 10, 15, settled_len=11)
    assert states.lengths(BLOCK) == [10, 11, 15]
    assert [states.resume_len([BLOCK], length) for length in (15, 14, 11, 10, 9)] == [15, 11, 11, 10, 0]
    assert run(states, 11, 18, settled_len=14) == 11
    assert states.lengths(BLOCK) == [11, 14, 18]


def test_settled_tokens_outlive_a_step_that_is_cut_behind_them() -> None:
    """The rows of one Verify may take two forwards."""
    states = StateCache()
    run(states, 0, 10)
    run(states, 10, 13, settled_len=11)
    run(states, 13, 15, settled_len=11)
    assert states.resume_len([BLOCK], 14) == 11


def test_a_sequence_that_begins_anew_forgets_what_its_block_held() -> None:
    states = StateCache()
    run(states, 0, 10)
    assert run(states, 0, 4) is None
    assert states.lengths(BLOCK) == [4]


def test_states_go_with_the_first_block() -> None:
    states = StateCache()
    allocator = BlockAllocator(4, 8, on_free=states.drop)
    table = BlockTable(allocator)
    table.reserve(20)
    first, *_, last = table.block_ids
    run(states, 0, 20, block=first)
    table.truncate(10)
    assert last not in table.block_ids and states.lengths(first) == [20]
    table.release()
    assert len(states) == 0


def test_no_state_where_one_is_needed_is_a_bug() -> None:
    states = StateCache()
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
