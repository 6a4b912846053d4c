"""Rows of prompts through a recurrence, chunk by chunk, as two Triton kernels. Importing it needs triton.

The formulas are those of ``layers.recurrences.absorb``. What a chunk's rows are to each other is computed for
all chunks at once: the inverse of the delta rule's triangular system, and the rows' products. Then a program
takes some columns of one head's state through the chunks of a sequence. Products are IEEE's, since a state
sums them over a whole prompt. Chunks end where a prompt may be cut, so cuts there change no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.cuda.recurrent.table_triton import load_state, replayed, store_state

UNIT = 64
"""Tokens of a whole chunk; ``state_slots.STATE_UNIT``."""
_COLUMNS = 32
_SLICE = 16
"""Numbers over which a product sums at once."""


@triton.jit
def _part(source, row, column, stride, count, size):
    """Numbers of a chunk's rows, ``[rows, columns]`` as the two indices lie; zeros make it up."""
    place = row.to(tl.int64) * stride + column
    return tl.load(source + place, mask=(row < count) & (column < size), other=0.0)


@triton.jit
def _gates(sums, row, key, KEY_DIM: tl.constexpr, GATE_DIM: tl.constexpr, UNIT: tl.constexpr):
    """Sums of log decays up to some rows, as the two indices lie."""
    if GATE_DIM == 1:
        return tl.load(sums + row + key * 0)
    return tl.load(sums + row * GATE_DIM + key, mask=(key < KEY_DIM) & (row < UNIT), other=0.0)


@triton.jit
def _row(matrix, index, UNIT: tl.constexpr):
    """One row of a matrix of ``UNIT`` rows, without NaN and infinities."""
    return tl.sum(tl.where(tl.arange(0, UNIT)[:, None] == index, matrix, 0.0), 0)


@triton.jit
def _relate(
    queries, keys, log_decays, rates, chunks, sums, rests, solved, related, query_stride, key_stride,
    NUM_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, GATE_DIM: tl.constexpr,
    HAS_RATES: tl.constexpr, KEYS: tl.constexpr, GATES: tl.constexpr, UNIT: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    row, gate = tl.arange(0, UNIT), tl.arange(0, GATES)
    keys += first * key_stride + head // SHARED * KEY_DIM
    queries += first * query_stride + head // SHARED * KEY_DIM
    log_decays += (first * NUM_HEADS + head) * GATE_DIM
    own = chunk.to(tl.int64) * NUM_HEADS + head
    logs = _part(log_decays, row[:, None], gate[None, :], NUM_HEADS * GATE_DIM, count, GATE_DIM)
    # In float64: rows far behind a sequence's beginning differ by little of what they have in common.
    exact = tl.cumsum(logs.to(tl.float64), 0)
    gates, rest = exact.to(tl.float32), (_row(exact, UNIT - 1, UNIT)[None, :] - exact).to(tl.float32)
    at = own * UNIT * GATE_DIM + row[:, None] * GATE_DIM + gate[None, :]
    tl.store(sums + at, gates, mask=(row[:, None] < UNIT) & (gate[None, :] < GATE_DIM))
    tl.store(rests + at, rest, mask=(row[:, None] < UNIT) & (gate[None, :] < GATE_DIM))
    products, answers = tl.zeros([UNIT, UNIT], tl.float32), tl.zeros([UNIT, UNIT], tl.float32)
    if GATE_DIM == 1:
        for begin in range(0, KEYS, SLICE):
            key = begin + tl.arange(0, SLICE)
            known = _part(keys, row[:, None], key[None, :], key_stride, count, KEY_DIM)
            asked = _part(queries, row[:, None], key[None, :], query_stride, count, KEY_DIM)
            others = _part(keys, row[None, :], key[:, None], key_stride, count, KEY_DIM)
            products += tl.dot(known, others, input_precision="ieee")
            answers += tl.dot(asked, others, input_precision="ieee")
        since = (tl.sum(exact, 1)[:, None] - tl.sum(exact, 1)[None, :]).to(tl.float32)
        # Masked before, since what rows behind would need is beyond all numbers.
        fading = tl.exp(tl.where(row[:, None] >= row[None, :], since, float("-inf")))
        products *= fading
        answers *= fading
    else:
        key = tl.arange(0, KEYS)
        known = _part(keys, row[:, None], key[None, :], key_stride, count, KEY_DIM)
        asked = _part(queries, row[:, None], key[None, :], query_stride, count, KEY_DIM)
        for column in range(UNIT):
            since = gates - _row(gates, column, UNIT)[None, :]
            faded = tl.exp(tl.where(row[:, None] >= column, since, float("-inf")))
            faded *= _row(known, column, UNIT)[None, :]
            is_column = row[None, :] == column
            products = tl.where(is_column, tl.sum(known * faded, 1)[:, None], products)
            answers = tl.where(is_column, tl.sum(asked * faded, 1)[:, None], answers)
    place = own * UNIT * UNIT + row[:, None] * UNIT + row[None, :]
    tl.store(related + place, answers)
    if HAS_RATES:
        rate = tl.load(rates + (first + row) * NUM_HEADS + head, mask=row < count, other=0.0)
        system = tl.where(row[:, None] > row[None, :], products * rate[:, None], 0.0)
        inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        for index in range(1, UNIT):
            # Rows before are done: what a row of the system makes of them is taken from its own.
            taken = tl.sum(_row(system, index, UNIT)[:, None] * inverse, 0)
            inverse = tl.where(row[:, None] == index, inverse - taken[None, :], inverse)
        tl.store(solved + place, inverse * rate[None, :])


@triton.jit
def _absorb(
    queries, keys, values, sums, rests, solved, related, learned, out,
    states, updates, kept_decays, kept_keys, sequences, chunks, query_stride, key_stride, value_stride,
    NUM_HEADS: tl.constexpr, SHARED: tl.constexpr, NUM_KEPT_KEYS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, GATE_DIM: tl.constexpr, MAX_OPEN: tl.constexpr, HAS_RATES: tl.constexpr,
    KEYS: tl.constexpr, GATES: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The state lies in registers, and in memory for products, which take it slice by slice: whole products
    of float32 numbers would have all of both factors in registers."""
    place, head, first_column = sequences + 5 * tl.program_id(0), tl.program_id(1), tl.program_id(2) * COLUMNS
    slot = tl.load(place).to(tl.int64)
    base, start = tl.load(place + 1), tl.load(place + 2)
    first_chunk, num_chunks = tl.load(place + 3), tl.load(place + 4)
    state = load_state(
        states, slot, head, base > 0, first_column, NUM_HEADS, KEY_DIM, VALUE_DIM, KEYS, COLUMNS
    )
    state = replayed(
        state, updates, kept_decays, kept_keys, slot, head, first_column, base, start,
        NUM_HEADS, NUM_KEPT_KEYS, KEY_DIM, VALUE_DIM, GATE_DIM, MAX_OPEN, KEYS, COLUMNS,
    )  # fmt: skip
    store_state(state, states, slot, head, first_column, NUM_HEADS, KEY_DIM, VALUE_DIM, KEYS, COLUMNS)
    own_state = states + (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    row, column = tl.arange(0, UNIT), first_column + tl.arange(0, COLUMNS)
    all_keys = tl.arange(0, KEYS)
    for number in range(num_chunks):
        tl.debug_barrier()
        chunk = (first_chunk + number).to(tl.int64)
        first, count = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
        own_keys = keys + first * key_stride + head // SHARED * KEY_DIM
        own_queries = queries + first * query_stride + head // SHARED * KEY_DIM
        own_values = values + first * value_stride + head * VALUE_DIM
        own_sums = sums + (chunk * NUM_HEADS + head) * UNIT * GATE_DIM
        own_rests = rests + (chunk * NUM_HEADS + head) * UNIT * GATE_DIM
        between = (chunk * NUM_HEADS + head) * UNIT * UNIT
        output, known = tl.zeros([UNIT, COLUMNS], tl.float32), tl.zeros([UNIT, COLUMNS], tl.float32)
        for begin in range(0, KEYS, SLICE):
            key = begin + tl.arange(0, SLICE)
            gates = _gates(own_sums, row[:, None], key[None, :], KEY_DIM, GATE_DIM, UNIT)
            some = _part(own_state, key[:, None], column[None, :], VALUE_DIM, KEY_DIM, VALUE_DIM)
            faded = tl.exp(gates)
            asked = _part(own_queries, row[:, None], key[None, :], query_stride, count, KEY_DIM)
            output += tl.dot(asked * faded, some, input_precision="ieee")
            if HAS_RATES:
                own = _part(own_keys, row[:, None], key[None, :], key_stride, count, KEY_DIM)
                known += tl.dot(own * faded, some, input_precision="ieee")
        if HAS_RATES:
            own_learned = learned + (chunk * NUM_HEADS + head) * UNIT * VALUE_DIM
            target = own_learned + row[:, None] * VALUE_DIM + column[None, :]
            is_column = (row[:, None] < UNIT) & (column[None, :] < VALUE_DIM)
            update = _part(own_values, row[:, None], column[None, :], value_stride, count, VALUE_DIM) - known
            tl.store(target, update, mask=is_column)
            tl.debug_barrier()
            update = tl.zeros([UNIT, COLUMNS], tl.float32)
            for begin in range(0, UNIT, SLICE):
                before = begin + tl.arange(0, SLICE)
                some = _part(own_learned, before[:, None], column[None, :], VALUE_DIM, UNIT, VALUE_DIM)
                weights = _part(solved + between, row[:, None], before[None, :], UNIT, UNIT, UNIT)
                update += tl.dot(weights, some, input_precision="ieee")
            tl.debug_barrier()
            tl.store(target, update, mask=is_column)
            tl.debug_barrier()
        if GATE_DIM == 1:
            state *= tl.exp(tl.load(own_sums + UNIT - 1))
        else:
            whole = tl.load(own_sums + (UNIT - 1) * GATE_DIM + all_keys, mask=all_keys < KEY_DIM, other=0.0)
            state *= tl.exp(whole)[:, None]
        for begin in range(0, UNIT, SLICE):
            before = begin + tl.arange(0, SLICE)
            if HAS_RATES:
                some = _part(own_learned, before[:, None], column[None, :], VALUE_DIM, UNIT, VALUE_DIM)
            else:
                some = _part(own_values, before[:, None], column[None, :], value_stride, count, VALUE_DIM)
            weights = _part(related + between, row[:, None], before[None, :], UNIT, UNIT, UNIT)
            output += tl.dot(weights, some, input_precision="ieee")
            rest = _gates(own_rests, before[None, :], all_keys[:, None], KEY_DIM, GATE_DIM, UNIT)
            own = _part(own_keys, before[None, :], all_keys[:, None], key_stride, count, KEY_DIM)
            state += tl.dot(own * tl.exp(rest), some, input_precision="ieee")
        tl.store(
            out + ((first + row) * NUM_HEADS + head)[:, None] * VALUE_DIM + column[None, :],
            output,
            mask=(row[:, None] < count) & (column[None, :] < VALUE_DIM),
        )
        # No part of the program still reads the state before.
        tl.debug_barrier()
        store_state(state, states, slot, head, first_column, NUM_HEADS, KEY_DIM, VALUE_DIM, KEYS, COLUMNS)


def absorb(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    rates: torch.Tensor | None,
    out: torch.Tensor,
    states: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sequences: torch.Tensor,
    chunks: torch.Tensor,
) -> None:
    """Puts the rows of prompts into their states, and computes what these answer.

    Args:
        queries, keys, values, rates, states, records: as for ``step_triton.advance``.
        log_decays: float32 ``[num_rows, num_heads, gate_dim]``, 0 or less.
        out: float32 ``[num_rows, num_heads, value_dim]``; written for the chunks' rows.
        sequences, chunks: ``state_pool.PromptChunks``.
    """
    num_heads, value_dim = out.shape[1:]
    num_key_heads, key_dim = keys.shape[1:]
    gate_dim = log_decays.shape[2]
    # The sizes that products take are powers of two, 16 or more.
    key_width = max(_SLICE, triton.next_power_of_2(key_dim))
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(value_dim)))

    def scratch(*size: int) -> torch.Tensor:
        return torch.empty(len(chunks), num_heads, UNIT, *size, dtype=torch.float32, device=out.device)

    sums, rests, related = scratch(gate_dim), scratch(gate_dim), scratch(UNIT)
    solved, learned = (related, related) if rates is None else (scratch(UNIT), scratch(value_dim))
    sizes = {
        "NUM_HEADS": num_heads,
        "SHARED": num_heads // num_key_heads,
        "KEY_DIM": key_dim,
        "GATE_DIM": gate_dim,
        "HAS_RATES": rates is not None,
        "KEYS": key_width,
        "GATES": 1 if gate_dim == 1 else key_width,
        "UNIT": UNIT,
        "SLICE": _SLICE,
    }
    _relate[(len(chunks), num_heads)](
        queries, keys, log_decays, log_decays if rates is None else rates, chunks,
        sums, rests, solved, related, queries.stride(0), keys.stride(0), **sizes, num_warps=8,
    )  # fmt: skip
    updates, kept_decays, kept_keys = records
    _absorb[(len(sequences), num_heads, triton.cdiv(value_dim, columns))](
        queries, keys, values, sums, rests, solved, related, learned, out,
        states, updates, kept_decays, kept_keys, sequences, chunks,
        queries.stride(0), keys.stride(0), values.stride(0),
        **sizes, NUM_KEPT_KEYS=kept_keys.shape[2], VALUE_DIM=value_dim,
        MAX_OPEN=updates.shape[1], COLUMNS=columns, num_warps=4,
    )  # fmt: skip
