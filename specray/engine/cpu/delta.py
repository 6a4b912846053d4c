"""Open rows of a gated delta rule layer in one kernel: convolution, norms, state and gate.

The heads that share a key head are computed by one thread, all rows of a sequence in turn. A run of a state's
columns does not depend on the others, so it stays in L1 from the first record to the last row. Every row is
computed by the same instructions, whatever rows are next to it: plain decoding and verifying give the same
bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import APART, Kernel, as_pointer
from specray.engine.step import (
    BASE,
    FIRST_ROW,
    NUM_COLUMNS,
    NUM_OPEN,
    SETTLED,
    SLOT,
    START,
    StateShape,
)

(
    ROWS, OUT, TAPS, RATES, BIAS, NORM, STATES, UPDATES, DECAYS, KEYS, INPUTS, TABLE,
    NUM_SEQUENCES, HEADS, KEY_HEADS, MAX_OPEN, SCRATCH, SCRATCH_SIZE, EPS, RATE_SCALE,
) = range(20)  # fmt: skip
NUM_ARGS = 20
_NORM_EPS = np.float32(1e-6)
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-87.0)


def scratch_size(shape: StateShape, max_open: int) -> int:
    """Float32 numbers of a thread."""
    shared = shape.num_heads // shape.num_key_heads
    row = 2 * shape.key_dim + shared * (2 * shape.value_dim + 2) + shape.key_dim + 1
    return max_open * row + shape.key_dim * shape.value_dim + APART // 4


@functools.cache
def delta_kernel(dtype: str, key_dim: int, value_dim: int, num_taps: int, shared: int) -> Kernel:
    name = f"delta-{dtype}-{key_dim}-{value_dim}-{num_taps}-{shared}"
    return Kernel(name, NUM_ARGS, lambda: _make_delta(dtype, key_dim, value_dim, num_taps, shared))


def _lanes(size: int, most: int) -> int:
    return next(lanes for lanes in (64, 32, 16, 8, 4, 2, 1) if lanes <= most and size % lanes == 0)


def _make_delta(dtype: str, key_dim: int, value_dim: int, num_taps: int, shared: int) -> Any:
    convolve = _make_convolution(dtype, num_taps)
    norm_keys = _make_key_norm(key_dim)
    run_head = _make_head(key_dim, value_dim)
    finish = _make_output(dtype, value_dim)
    one = vectors(1, dtype)
    load_one, total_one = one.load, vectors(1).sum
    num_values = shared * value_dim
    width = 2 * key_dim + num_values

    @kernel()
    def run_group(args: Any, floats: Any, row: int, head: int, scratch: int) -> None:
        """Computes the heads of a sequence that share a key head."""
        table = carray(as_pointer(args[TABLE]), (args[NUM_SEQUENCES] * NUM_COLUMNS,), np.int32)
        at = row * NUM_COLUMNS
        slot, settled, first, count = (
            table[at + SLOT],
            table[at + SETTLED],
            table[at + FIRST_ROW],
            table[at + NUM_OPEN],
        )
        base, start, most = table[at + BASE], table[at + START], args[MAX_OPEN]
        # Rows that settled at once are in the state already.
        base = settled if settled > start else base
        kept = start - base if settled == start else 0
        num_heads, num_key_heads = args[HEADS], args[KEY_HEADS]
        all_keys = num_key_heads * key_dim
        channels = 2 * all_keys + num_heads * value_dim
        step = channels + num_heads * (value_dim + 2)
        place = (slot, settled, first, count, most + num_taps - 1, channels, step)
        key_at, value_at = all_keys + head * key_dim, 2 * all_keys + head * num_values
        convolve(args[ROWS], args[INPUTS], args[TAPS], scratch, place, head * key_dim, key_dim, 0, width)
        convolve(args[ROWS], args[INPUTS], args[TAPS], scratch, place, key_at, key_dim, key_dim, width)
        convolve(
            args[ROWS], args[INPUTS], args[TAPS], scratch, place, value_at, num_values, 2 * key_dim, width
        )
        norm_keys(scratch, count, width)
        outputs = scratch + 4 * count * width
        decays, kept_decays = outputs + 4 * count * num_values, outputs + 4 * count * (num_values + 2)
        kept_keys = kept_decays + 4 * most
        block = kept_keys + 4 * most * key_dim
        keys = carray(as_pointer(args[KEYS]), (1 << 40,), np.float32)
        copied = carray(as_pointer(kept_keys), (1 << 40,), np.float32)
        for record in range(kept):
            begin = ((slot * most + (base + record) % most) * num_key_heads + head) * key_dim
            for number in range(key_dim):
                copied[record * key_dim + number] = keys[begin + number]
        rates = carray(as_pointer(args[RATES]), (num_heads,), np.float32)
        biases = carray(as_pointer(args[BIAS]), (num_heads,), np.float32)
        gates = carray(as_pointer(decays), (2 * count,), np.float32)
        old = carray(as_pointer(kept_decays), (most,), np.float32)
        records = carray(as_pointer(args[DECAYS]), (1 << 40,), np.float32)
        for local in range(shared):
            own = head * shared + local
            for record in range(kept):
                old[record] = records[(slot * most + (base + record) % most) * num_heads + own]
            for index in range(count):
                begin = (first + index) * step + channels + num_heads * value_dim + own
                b = total_one(load_one(args[ROWS], begin))
                a = np.float64(total_one(load_one(args[ROWS], begin + num_heads))) + np.float64(biases[own])
                softplus = a if a > 20.0 else np.log(1.0 + np.exp(a))
                gates[2 * index] = np.float32(np.exp(-np.float64(rates[own]) * softplus))
                gates[2 * index + 1] = floats[2 * RATE_SCALE] / (_ONE + np.exp(-b))
            states = args[STATES] + 4 * (slot * num_heads + own) * key_dim * value_dim
            updates = args[UPDATES] + 4 * (slot * most * num_heads + own) * value_dim
            run_head(
                (states, updates, num_heads * value_dim, most),
                (scratch, width, 2 * key_dim + local * value_dim, outputs, num_values, local * value_dim),
                (decays, kept_decays, kept_keys, block),
                (base, kept, settled, count),
            )
            for index in range(count):
                records[(slot * most + (settled + index) % most) * num_heads + own] = gates[2 * index]
            finish(
                (args[ROWS], args[OUT], args[NORM], outputs),
                (first, count, step, channels, num_heads, own, num_values, local),
                floats[2 * EPS],
            )
        mixed = carray(as_pointer(scratch), (1 << 40,), np.float32)
        for index in range(count):
            begin = ((slot * most + (settled + index) % most) * num_key_heads + head) * key_dim
            for number in range(key_dim):
                keys[begin + number] = mixed[index * width + key_dim + number]

    def delta(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        floats = carray(as_pointer(address), (2 * NUM_ARGS,), np.float32)
        table = carray(as_pointer(args[TABLE]), (args[NUM_SEQUENCES] * NUM_COLUMNS,), np.int32)
        scratch, heads = args[SCRATCH] + 4 * thread * args[SCRATCH_SIZE], args[KEY_HEADS]
        for item in range(part, args[NUM_SEQUENCES] * heads, num_parts):
            if table[item // heads * NUM_COLUMNS + NUM_OPEN] > 0:
                run_group(args, floats, item // heads, item % heads, scratch)

    return delta


def _make_convolution(dtype: str, num_taps: int) -> Any:
    """Makes what convolves some channels of a sequence's rows, and keeps their inputs."""
    number = vectors(1)
    one, one_splat, one_fma, one_div, one_add, one_sub, one_max, one_exp = (
        vectors(1, dtype), number.splat, number.fma, number.div, number.add, number.sub, number.max,
        number.exp,
    )  # fmt: skip
    wide, stored = vectors(16), vectors(16, dtype)
    splat, fma, div, add, sub, larger, exp = (
        wide.splat, wide.fma, wide.div, wide.add, wide.sub, wide.max, wide.exp,
    )  # fmt: skip
    load, store, keep, fetch = stored.load, stored.store, wide.store, wide.load
    load_one, store_one, keep_one, fetch_one = one.load, one.store, number.store, number.load
    num_before = num_taps - 1

    @kernel()
    def convolve(
        rows: int,
        inputs: int,
        taps: int,
        out: int,
        place: Any,
        begin: int,
        size: int,
        column: int,
        width: int,
    ) -> None:
        slot, settled, first, count, ring, channels, step = place
        ring_at = slot * ring * channels + begin
        end = size // 16 * 16
        for index in range(count):
            for at in range(0, end, 16):
                total = splat(_ZERO)
                for tap in range(num_taps):
                    position = settled + index - num_before + tap
                    weight = fetch(taps, tap * channels + begin + at)
                    if position >= settled:
                        row = first + position - settled
                        total = fma(load(rows, row * step + begin + at), weight, total)
                    elif position >= 0:
                        total = fma(load(inputs, ring_at + position % ring * channels + at), weight, total)
                inverse = add(splat(_ONE), exp(sub(splat(_ZERO), larger(total, splat(_LOWEST)))))
                keep(out, index * width + column + at, div(total, inverse))
            for at in range(end, size):
                single = one_splat(_ZERO)
                for tap in range(num_taps):
                    position = settled + index - num_before + tap
                    factor = fetch_one(taps, tap * channels + begin + at)
                    if position >= settled:
                        row = first + position - settled
                        single = one_fma(load_one(rows, row * step + begin + at), factor, single)
                    elif position >= 0:
                        known = load_one(inputs, ring_at + position % ring * channels + at)
                        single = one_fma(known, factor, single)
                exponent = one_sub(one_splat(_ZERO), one_max(single, one_splat(_LOWEST)))
                below = one_add(one_splat(_ONE), one_exp(exponent))
                keep_one(out, index * width + column + at, one_div(single, below))
        for index in range(count):
            here, there = (first + index) * step + begin, ring_at + (settled + index) % ring * channels
            for at in range(0, end, 16):
                store(inputs, there + at, load(rows, here + at))
            for at in range(end, size):
                store_one(inputs, there + at, load_one(rows, here + at))

    return convolve


def _make_key_norm(key_dim: int) -> Any:
    """Makes what norms each row's query and key, which are the row's first numbers."""
    lanes = _lanes(key_dim, 16)
    wide = vectors(lanes)
    load, store, splat, mul, fma, total = wide.load, wide.store, wide.splat, wide.mul, wide.fma, wide.sum
    scale = np.float32(key_dim**-0.5)

    @kernel()
    def norm_keys(rows: int, count: int, width: int) -> None:
        for index in range(count):
            for part in range(2):
                begin = index * width + part * key_dim
                squares = splat(_ZERO)
                for at in range(begin, begin + key_dim, lanes):
                    squares = fma(load(rows, at), load(rows, at), squares)
                factor = _ONE / np.sqrt(total(squares) + _NORM_EPS)
                if part == 0:
                    factor *= scale
                for at in range(begin, begin + key_dim, lanes):
                    store(rows, at, mul(load(rows, at), splat(factor)))

    return norm_keys


def _make_head(key_dim: int, value_dim: int) -> Any:
    """Makes what puts a head's records into its state, and runs the head over the rows."""
    lanes = _lanes(value_dim, 64)
    wide = vectors(lanes)
    load, store, splat, mul, sub, fma = wide.load, wide.store, wide.splat, wide.mul, wide.sub, wide.fma

    @kernel()
    def run_head(memory: Any, rows: Any, scratch: Any, counts: Any) -> None:
        states, updates, record_step, most = memory
        mixed, width, value_at, outputs, out_width, out_at = rows
        decays, kept_decays, kept_keys, block = scratch
        base, kept, settled, count = counts
        gates = carray(as_pointer(decays), (1 << 40,), np.float32)
        old = carray(as_pointer(kept_decays), (1 << 40,), np.float32)
        known = carray(as_pointer(kept_keys), (1 << 40,), np.float32)
        numbers = carray(as_pointer(mixed), (1 << 40,), np.float32)
        for column in range(0, value_dim, lanes):
            source, source_step = states + 4 * column, value_dim
            if base == 0:
                source, source_step = block, lanes
                for key in range(key_dim):
                    store(block, key * lanes, splat(_ZERO))
            for record in range(kept):
                decay = splat(old[record])
                update = load(updates, (base + record) % most * record_step + column)
                for key in range(key_dim):
                    faded = mul(decay, load(source, key * source_step))
                    learned = fma(splat(known[record * key_dim + key]), update, faded)
                    store(states, key * value_dim + column, learned)
                source, source_step = states + 4 * column, value_dim
            for index in range(count):
                decay, at = splat(gates[2 * index]), index * width
                memory_sum = splat(_ZERO)
                for key in range(key_dim):
                    faded = mul(decay, load(source, key * source_step))
                    memory_sum = fma(splat(numbers[at + key_dim + key]), faded, memory_sum)
                value = load(mixed, at + value_at + column)
                update = mul(splat(gates[2 * index + 1]), sub(value, memory_sum))
                store(updates, (settled + index) % most * record_step + column, update)
                output, is_last = splat(_ZERO), index == count - 1
                for key in range(key_dim):
                    faded = mul(decay, load(source, key * source_step))
                    learned = fma(splat(numbers[at + key_dim + key]), update, faded)
                    output = fma(splat(numbers[at + key]), learned, output)
                    if not is_last:
                        store(block, key * lanes, learned)
                store(outputs, index * out_width + out_at + column, output)
                source, source_step = block, lanes

    return run_head


def _make_output(dtype: str, value_dim: int) -> Any:
    """Makes what norms a head's outputs and multiplies them by their gate."""
    lanes = _lanes(value_dim, 16)
    wide, stored = vectors(lanes), vectors(lanes, dtype)
    splat, mul, div, add, sub, fma, larger, exp, total = (
        wide.splat, wide.mul, wide.div, wide.add, wide.sub, wide.fma, wide.max, wide.exp, wide.sum,
    )  # fmt: skip
    load, load_row, store_row = wide.load, stored.load, stored.store
    size = np.float32(value_dim)

    @kernel()
    def finish(memory: Any, place: Any, eps: Any) -> None:
        rows, out, norm, outputs = memory
        first, count, step, channels, num_heads, own, out_width, local = place
        for index in range(count):
            begin = index * out_width + local * value_dim
            squares = splat(_ZERO)
            for at in range(begin, begin + value_dim, lanes):
                squares = fma(load(outputs, at), load(outputs, at), squares)
            factor = splat(_ONE / np.sqrt(total(squares) / size + eps))
            gate_at = (first + index) * step + channels + own * value_dim
            out_at = ((first + index) * num_heads + own) * value_dim
            for at in range(0, value_dim, lanes):
                normed = mul(mul(load(outputs, begin + at), factor), load(norm, at))
                gate = load_row(rows, gate_at + at)
                inverse = add(splat(_ONE), exp(sub(splat(_ZERO), larger(gate, splat(_LOWEST)))))
                store_row(out, out_at + at, mul(normed, div(gate, inverse)))

    return finish
