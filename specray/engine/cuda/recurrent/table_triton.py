"""What kernels of recurrent layers read of a step's table, and of states. Importing it needs triton."""

from __future__ import annotations

import triton
import triton.language as tl

import specray.engine.step as columns

SLOT = tl.constexpr(columns.SLOT)
BASE = tl.constexpr(columns.BASE)
START = tl.constexpr(columns.START)
SETTLED = tl.constexpr(columns.SETTLED)
FIRST_ROW = tl.constexpr(columns.FIRST_ROW)
NUM_OPEN = tl.constexpr(columns.NUM_OPEN)
NUM_COLUMNS = tl.constexpr(columns.NUM_COLUMNS)


@triton.jit
def owner_of(row, table, num_sequences, SEQUENCES: tl.constexpr):
    """The number of the sequence that a row belongs to; -1: it is padding."""
    index = tl.arange(0, SEQUENCES)
    is_sequence = index < num_sequences
    place = table + index * NUM_COLUMNS
    start = tl.load(place + START, mask=is_sequence, other=0)
    opened = tl.maximum(start, tl.load(place + SETTLED, mask=is_sequence, other=0))
    first = tl.load(place + FIRST_ROW, mask=is_sequence, other=0)
    count = tl.load(place + NUM_OPEN, mask=is_sequence, other=0)
    is_owner = (row >= first - (opened - start)) & (row < first + count)
    return tl.max(tl.where(is_owner, index, -1), 0)


@triton.jit
def load_state(
    states, slot, head, is_begun, first_column,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's state, ``[KEYS, COLUMNS]``; zeros before a sequence's first token."""
    key, column = tl.arange(0, KEYS), first_column + tl.arange(0, COLUMNS)
    place = ((slot * NUM_HEADS + head) * KEY_DIM + key[:, None]) * VALUE_DIM + column[None, :]
    # Masks of vectors alone: the interpreter cannot join one with a single truth.
    is_place = (key[:, None] < tl.where(is_begun, KEY_DIM, 0)) & (column[None, :] < VALUE_DIM)
    return tl.load(states + place, mask=is_place, other=0.0)


@triton.jit
def store_state(
    state, states, slot, head, first_column,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    key, column = tl.arange(0, KEYS), first_column + tl.arange(0, COLUMNS)
    place = ((slot * NUM_HEADS + head) * KEY_DIM + key[:, None]) * VALUE_DIM + column[None, :]
    tl.store(states + place, state, mask=(key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM))


@triton.jit
def replayed(
    state, updates, decays, keys, slot, head, first_column, begin, end,
    NUM_HEADS: tl.constexpr, NUM_KEPT_KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    GATE_DIM: tl.constexpr, MAX_OPEN: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The state behind the records of the tokens ``begin .. end - 1``, bit for bit as their rows left it."""
    key, column = tl.arange(0, KEYS), first_column + tl.arange(0, COLUMNS)
    for position in range(begin, end):
        at = slot * MAX_OPEN + position % MAX_OPEN
        own = at * NUM_HEADS + head
        if GATE_DIM == 1:
            state = state * tl.load(decays + own)
        else:
            state = state * tl.load(decays + own * KEY_DIM + key, mask=key < KEY_DIM, other=0.0)[:, None]
        learned = tl.load(updates + own * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0)
        known = (at * NUM_KEPT_KEYS + head // (NUM_HEADS // NUM_KEPT_KEYS)) * KEY_DIM + key
        # Rounded once, here and in a row's step, so that no compiler chooses which product is.
        state = tl.fma(tl.load(keys + known, mask=key < KEY_DIM, other=0.0)[:, None], learned[None, :], state)
    return state
