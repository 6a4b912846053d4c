"""Open rows of a recurrence as one Triton kernel. Importing it needs triton.

A program has some columns of one head's state of one sequence in registers: it puts the records of the rows
that stay into it, writes it back, and then computes all open rows in turn, which leave their records and the
state in memory as it is. One program reads and writes a state once a step, whatever its rows; nothing in it
depends on their number, so plain decoding and verifying give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.cuda.recurrent.table_triton import (
    BASE,
    FIRST_ROW,
    NUM_COLUMNS,
    NUM_OPEN,
    SETTLED,
    SLOT,
    START,
    load_state,
    replayed,
    store_state,
)

_COLUMNS = 32
"""Columns of a state in a program: with 32 heads of 128 a single sequence fills a GPU."""


@triton.jit
def _step(
    queries, keys, values, decays, rates, out, states, updates, kept_decays, kept_keys, table,
    query_stride, key_stride, value_stride,
    NUM_HEADS: tl.constexpr, SHARED: tl.constexpr, NUM_KEPT_KEYS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, GATE_DIM: tl.constexpr, MAX_OPEN: tl.constexpr, HAS_RATES: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = table + tl.program_id(0) * NUM_COLUMNS
    head, first_column = tl.program_id(1), tl.program_id(2) * COLUMNS
    count = tl.load(place + NUM_OPEN)
    if count > 0:
        slot = tl.load(place + SLOT).to(tl.int64)
        base, start = tl.load(place + BASE), tl.load(place + START)
        settled, first = tl.load(place + SETTLED), tl.load(place + FIRST_ROW)
        # Rows that settle at once are in the state already.
        begin = tl.where(settled > start, start, base)
        folded, opened = tl.minimum(settled, start), tl.maximum(settled, start)
        state = load_state(
            states, slot, head, (settled > start) | (base > 0), first_column,
            NUM_HEADS, KEY_DIM, VALUE_DIM, KEYS, COLUMNS,
        )  # fmt: skip
        if begin < folded:
            state = replayed(
                state, updates, kept_decays, kept_keys, slot, head, first_column, begin, folded,
                NUM_HEADS, NUM_KEPT_KEYS, KEY_DIM, VALUE_DIM, GATE_DIM, MAX_OPEN, KEYS, COLUMNS,
            )  # fmt: skip
            store_state(state, states, slot, head, first_column, NUM_HEADS, KEY_DIM, VALUE_DIM, KEYS, COLUMNS)
        state = replayed(
            state, updates, kept_decays, kept_keys, slot, head, first_column, folded, start,
            NUM_HEADS, NUM_KEPT_KEYS, KEY_DIM, VALUE_DIM, GATE_DIM, MAX_OPEN, KEYS, COLUMNS,
        )  # fmt: skip
        key, column = tl.arange(0, KEYS), first_column + tl.arange(0, COLUMNS)
        is_key, is_column = key < KEY_DIM, column < VALUE_DIM
        shared = head // SHARED * KEY_DIM + key
        for index in range(count):
            row = (first + index).to(tl.int64)
            own = row * NUM_HEADS + head
            if GATE_DIM == 1:
                state = state * tl.load(decays + own)
            else:
                state = state * tl.load(decays + own * KEY_DIM + key, mask=is_key, other=0.0)[:, None]
            known = tl.load(keys + row * key_stride + shared, mask=is_key, other=0.0)
            asked = tl.load(queries + row * query_stride + shared, mask=is_key, other=0.0)
            update = tl.load(
                values + row * value_stride + head * VALUE_DIM + column, mask=is_column, other=0.0
            )
            if HAS_RATES:
                update = (update - tl.sum(state * known[:, None], 0)) * tl.load(rates + own)
            state = tl.fma(known[:, None], update[None, :], state)
            tl.store(out + own * VALUE_DIM + column, tl.sum(state * asked[:, None], 0), mask=is_column)
            # Behind a sum over all of the program: no part of it still reads the record that was here.
            kept = (slot * MAX_OPEN + (opened + index) % MAX_OPEN) * NUM_HEADS + head
            tl.store(updates + kept * VALUE_DIM + column, update, mask=is_column)


def advance(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    rates: torch.Tensor | None,
    out: torch.Tensor,
    states: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    table: torch.Tensor,
) -> None:
    """Computes the open rows of all sequences of a step, and keeps their updates.

    Decays and keys of the rows are to be kept behind it (``heads_triton.keep``): other programs read those
    of the rows before.

    Args:
        queries, keys: of all rows, float32 ``[num_rows, num_key_heads, key_dim]``; rows may be apart.
        values: float32 ``[num_rows, num_heads, value_dim]``; rows may be apart.
        decays: float32 ``[num_rows, num_heads, gate_dim]``.
        rates: float32 ``[num_rows, num_heads]``; None: no delta rule.
        out: float32 ``[num_rows, num_heads, value_dim]``; written for open rows.
        states: ``[num_slots, num_heads, key_dim, value_dim]``.
        records: updates, decays and keys, ``state_pool.LayerStates``.
        table: int32 ``[num_sequences, 6]``.
    """
    num_heads, value_dim = out.shape[1:]
    num_key_heads, key_dim = keys.shape[1:]
    columns = min(_COLUMNS, triton.next_power_of_2(value_dim))
    updates, kept_decays, kept_keys = records
    _step[(len(table), num_heads, triton.cdiv(value_dim, columns))](
        queries, keys, values, decays, decays if rates is None else rates, out,
        states, updates, kept_decays, kept_keys, table,
        queries.stride(0), keys.stride(0), values.stride(0),
        NUM_HEADS=num_heads, SHARED=num_heads // num_key_heads, NUM_KEPT_KEYS=kept_keys.shape[2],
        KEY_DIM=key_dim, VALUE_DIM=value_dim, GATE_DIM=decays.shape[2], MAX_OPEN=updates.shape[1],
        HAS_RATES=rates is not None, KEYS=triton.next_power_of_2(key_dim), COLUMNS=columns, num_warps=4,
    )  # fmt: skip
