"""Open rows of a recurrent layer in one kernel: convolution, norms of keys, state and gate.

A run of heads that share keys is computed by one thread, all rows of a sequence in turn. A run of a state's
columns does not depend on the others, so it stays in L1 from the first record to the last row. Every row is
computed by the same instructions, whatever rows are next to it: plain decoding and verifying give the same
bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
)

(
    ROWS, OUT, TAPS, CONV_BIAS, RATES, BIAS, WEIGHT, SKIPS, STATES, UPDATES, DECAYS, KEYS, INPUTS, TABLE,
    NUM_SEQUENCES, HEADS, GROUPS, MAX_OPEN, SCRATCH, SCRATCH_SIZE, EPS, SCALE, GATE_SCALE, LEAST, MOST,
) = range(25)  # fmt: skip
NUM_ARGS = 25
_NORM_EPS = np.float32(1e-6)
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-87.0)


class HeadRule(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    key_dim: int
    value_dim: int
    gate_dim: int
    num_taps: int
    run: int
    """Heads that one thread computes together, which share keys."""
    is_delta: bool
    """The delta rule, with norms of keys and of each head's outputs, before their gate; False: Mamba 2, whose
    outputs are gated here and normed elsewhere."""
    has_sigmoid: bool = False
    """The gate of outputs is a sigmoid; else SiLU."""
    has_least: bool = False
    """Logarithms of decays are shares of the least; else they have none."""

    @property
    def num_gates(self) -> int:
        """Numbers of a row and head behind its gate of outputs."""
        return self.gate_dim + self.is_delta

    @property
    def width(self) -> int:
        """Convolved numbers of a row in scratch memory."""
        return 2 * self.key_dim + self.run * self.value_dim


def scratch_size(rule: HeadRule, max_open: int) -> int:
    """Float32 numbers of a thread."""
    row = rule.width + rule.run * rule.value_dim + 2 * rule.gate_dim + 1 + rule.key_dim
    return max_open * row + rule.key_dim * rule.value_dim + APART // 4


@functools.cache
def recurrence_kernel(rule: HeadRule) -> Kernel:
    name = f"recurrence-{'-'.join(map(str, rule))}"
    return Kernel(name, NUM_ARGS, lambda: _make_recurrence(rule))


def lanes_of(size: int, most: int) -> int:
    """Numbers of the widest vector, up to ``most``, that divides ``size``."""
    return next(lanes for lanes in (64, 32, 16, 8, 4, 2, 1) if lanes <= most and size % lanes == 0)


def _make_recurrence(rule: HeadRule) -> Any:
    dtype, key_dim, value_dim, gate_dim, num_taps, run, is_delta, *_ = rule
    convolve = _make_convolution(dtype, num_taps)
    norm_keys = _make_key_norm(key_dim)
    run_head = _make_head(key_dim, value_dim, gate_dim, is_delta=is_delta)
    choose = _make_gates(rule)
    finish = _make_output(rule)
    num_values, width, num_gates = run * value_dim, rule.width, rule.num_gates

    @kernel()
    def run_heads(args: Any, floats: Any, row: int, item: int, scratch: int) -> None:
        """Computes a run of heads of a sequence."""
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
        opened = max(start, settled)
        kept, folded = opened - base, settled - base
        num_heads, num_groups = args[HEADS], args[GROUPS]
        num_runs = num_heads // run
        group = item // (num_runs // num_groups)
        all_keys = num_groups * key_dim
        channels = 2 * all_keys + num_heads * value_dim
        step = channels + num_heads * (value_dim + num_gates)
        place = (slot, opened, first, count, most + num_taps - 1, channels, step)
        memory = (args[ROWS], args[INPUTS], args[TAPS], args[CONV_BIAS], scratch)
        key_at, value_at = all_keys + group * key_dim, 2 * all_keys + item * num_values
        convolve(memory, place, group * key_dim, key_dim, 0, width)
        convolve(memory, place, key_at, key_dim, key_dim, width)
        convolve(memory, place, value_at, num_values, 2 * key_dim, width)
        if is_delta:
            norm_keys(scratch, count, width)
        outputs = scratch + 4 * count * width
        gates = outputs + 4 * count * num_values
        kept_gates = gates + 4 * count * (gate_dim + 1)
        kept_keys = kept_gates + 4 * most * gate_dim
        block = kept_keys + 4 * most * key_dim
        keys = carray(as_pointer(args[KEYS]), (1 << 40,), np.float32)
        copied = carray(as_pointer(kept_keys), (1 << 40,), np.float32)
        for record in range(kept):
            begin = ((slot * most + (base + record) % most) * num_runs + item) * key_dim
            for number in range(key_dim):
                copied[record * key_dim + number] = keys[begin + number]
        chosen = carray(as_pointer(gates), (1 << 40,), np.float32)
        old = carray(as_pointer(kept_gates), (1 << 40,), np.float32)
        records = carray(as_pointer(args[DECAYS]), (1 << 40,), np.float32)
        for local in range(run):
            own = item * run + local
            for record in range(kept):
                begin = ((slot * most + (base + record) % most) * num_heads + own) * gate_dim
                for number in range(gate_dim):
                    old[record * gate_dim + number] = records[begin + number]
            gate_at = first * step + channels + num_heads * value_dim
            choose(args, floats, gates, (gate_at, step, num_heads, own, count))
            states = args[STATES] + 4 * (slot * num_heads + own) * key_dim * value_dim
            updates = args[UPDATES] + 4 * (slot * most * num_heads + own) * value_dim
            run_head(
                (states, updates, num_heads * value_dim, most),
                (scratch, width, 2 * key_dim + local * value_dim, outputs, num_values, local * value_dim),
                (gates, kept_gates, kept_keys, block),
                (base, kept, folded, opened, count),
            )
            for index in range(count):
                begin = ((slot * most + (opened + index) % most) * num_heads + own) * gate_dim
                for number in range(gate_dim):
                    records[begin + number] = chosen[index * (gate_dim + 1) + number]
            finish(args, floats, (scratch, outputs), (first, count, step, channels, own, local))
        mixed = carray(as_pointer(scratch), (1 << 40,), np.float32)
        for index in range(count):
            begin = ((slot * most + (opened + index) % most) * num_runs + item) * key_dim
            for number in range(key_dim):
                keys[begin + number] = mixed[index * width + key_dim + number]

    def recurrence(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (NUM_ARGS,), np.int64)
        floats = carray(as_pointer(address), (2 * NUM_ARGS,), np.float32)
        table = carray(as_pointer(args[TABLE]), (args[NUM_SEQUENCES] * NUM_COLUMNS,), np.int32)
        scratch, runs = args[SCRATCH] + 4 * thread * args[SCRATCH_SIZE], args[HEADS] // run
        for item in range(part, args[NUM_SEQUENCES] * runs, num_parts):
            if table[item // runs * NUM_COLUMNS + NUM_OPEN] > 0:
                run_heads(args, floats, item // runs, item % runs, scratch)

    return recurrence


def _make_gates(rule: HeadRule) -> Any:
    """Makes what says how much a head forgets and learns with a row: decays, and a factor of updates."""
    gate_dim, is_delta, num_gates = rule.gate_dim, rule.is_delta, rule.gate_dim + 1
    load_one, total_one, has_least = vectors(1, rule.dtype).load, vectors(1).sum, rule.has_least

    @kernel()
    def choose(args: Any, floats: Any, gates: int, place: Any) -> None:
        begin, step, num_heads, own, count = place
        rates = carray(as_pointer(args[RATES]), (num_heads,), np.float32)
        biases = carray(as_pointer(args[BIAS]), (num_heads * gate_dim,), np.float32)
        found = carray(as_pointer(gates), (count * num_gates,), np.float32)
        scale, rate = floats[2 * SCALE], np.float64(rates[own])
        for index in range(count):
            at = begin + index * step + own
            if is_delta:
                b = total_one(load_one(args[ROWS], at))
                found[index * num_gates + gate_dim] = scale / (_ONE + np.exp(-b))
                at += num_heads + own * (gate_dim - 1)
            for number in range(gate_dim):
                a = np.float64(total_one(load_one(args[ROWS], at + number)))
                if not is_delta:
                    a *= np.float64(scale)
                a += np.float64(biases[own * gate_dim + number])
                if has_least:
                    share = 1.0 / (1.0 + np.exp(-rate * a))
                    found[index * num_gates + number] = np.float32(
                        np.exp(np.float64(floats[2 * LEAST]) * share)
                    )
                    continue
                softplus = a if a > 20.0 else np.log(1.0 + np.exp(a))
                if not is_delta:
                    softplus = min(max(softplus, np.float64(floats[2 * LEAST])), np.float64(floats[2 * MOST]))
                    found[index * num_gates + gate_dim] = np.float32(softplus)
                found[index * num_gates + number] = np.float32(np.exp(-rate * softplus))

    return choose


def _make_convolution(dtype: str, num_taps: int) -> Any:
    """Makes what keeps some channels of a sequence's rows, and convolves them."""
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
    def convolve(memory: Any, place: Any, begin: int, size: int, column: int, width: int) -> None:
        rows, inputs, taps, bias, out = memory
        slot, opened, first, count, ring, channels, step = place
        ring_at = slot * ring * channels + begin
        end = size // 16 * 16
        # Threads that share channels write the same numbers.
        for index in range(count):
            here, there = (first + index) * step + begin, ring_at + (opened + index) % ring * channels
            for at in range(0, end, 16):
                store(inputs, there + at, load(rows, here + at))
            for at in range(end, size):
                store_one(inputs, there + at, load_one(rows, here + at))
        for index in range(count):
            oldest = opened + index - num_before
            for at in range(0, end, 16):
                total = fetch(bias, begin + at)
                for tap in range(max(0, -oldest), num_taps):
                    known = load(inputs, ring_at + (oldest + tap) % ring * channels + at)
                    total = fma(known, fetch(taps, tap * channels + begin + at), total)
                inverse = add(splat(_ONE), exp(sub(splat(_ZERO), larger(total, splat(_LOWEST)))))
                keep(out, index * width + column + at, div(total, inverse))
            for at in range(end, size):
                single = fetch_one(bias, begin + at)
                for tap in range(max(0, -oldest), num_taps):
                    known_one = load_one(inputs, ring_at + (oldest + tap) % ring * channels + at)
                    single = one_fma(known_one, fetch_one(taps, tap * channels + begin + at), single)
                exponent = one_sub(one_splat(_ZERO), one_max(single, one_splat(_LOWEST)))
                below = one_add(one_splat(_ONE), one_exp(exponent))
                keep_one(out, index * width + column + at, one_div(single, below))

    return convolve


def _make_key_norm(key_dim: int) -> Any:
    """Makes what norms each row's query and key, which are the row's first numbers."""
    lanes = lanes_of(key_dim, 16)
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


def _make_head(key_dim: int, value_dim: int, gate_dim: int, *, is_delta: bool) -> Any:
    """Makes what puts a head's records into its state, and runs the head over the rows."""
    lanes = lanes_of(value_dim, 64)
    wide = vectors(lanes)
    load, store, splat, mul, sub, fma = wide.load, wide.store, wide.splat, wide.mul, wide.sub, wide.fma

    @kernel()
    def run_head(memory: Any, rows: Any, scratch: Any, counts: Any) -> None:
        states, updates, record_step, most = memory
        mixed, width, value_at, outputs, out_width, out_at = rows
        chosen, kept_gates, kept_keys, block = scratch
        base, kept, folded, opened, count = counts
        gates = carray(as_pointer(chosen), (1 << 40,), np.float32)
        old = carray(as_pointer(kept_gates), (1 << 40,), np.float32)
        known = carray(as_pointer(kept_keys), (1 << 40,), np.float32)
        numbers = carray(as_pointer(mixed), (1 << 40,), np.float32)
        for column in range(0, value_dim, lanes):
            source, source_step = states + 4 * column, value_dim
            if base == 0:
                source, source_step = block, lanes
                for key in range(key_dim):
                    store(block, key * lanes, splat(_ZERO))
            for record in range(kept):
                decay = splat(old[record * gate_dim])
                update = load(updates, (base + record) % most * record_step + column)
                target, target_step = states + 4 * column, value_dim
                if record >= folded:
                    target, target_step = block, lanes
                for key in range(key_dim):
                    if gate_dim > 1:
                        decay = splat(old[record * gate_dim + key])
                    faded = mul(decay, load(source, key * source_step))
                    learned = fma(splat(known[record * key_dim + key]), update, faded)
                    store(target, key * target_step, learned)
                source, source_step = target, target_step
            for index in range(count):
                gate_at, at = index * (gate_dim + 1), index * width
                decay = splat(gates[gate_at])
                update = load(mixed, at + value_at + column)
                if is_delta:
                    memory_sum = splat(_ZERO)
                    for key in range(key_dim):
                        if gate_dim > 1:
                            decay = splat(gates[gate_at + key])
                        faded = mul(decay, load(source, key * source_step))
                        memory_sum = fma(splat(numbers[at + key_dim + key]), faded, memory_sum)
                    update = sub(update, memory_sum)
                update = mul(splat(gates[gate_at + gate_dim]), update)
                store(updates, (opened + index) % most * record_step + column, update)
                output, is_last = splat(_ZERO), index == count - 1
                for key in range(key_dim):
                    if gate_dim > 1:
                        decay = splat(gates[gate_at + key])
                    faded = mul(decay, load(source, key * source_step))
                    learned = fma(splat(numbers[at + key_dim + key]), update, faded)
                    output = fma(splat(numbers[at + key]), learned, output)
                    if not is_last:
                        store(block, key * lanes, learned)
                store(outputs, index * out_width + out_at + column, output)
                source, source_step = block, lanes

    return run_head


def _make_output(rule: HeadRule) -> Any:
    """Makes what norms a head's outputs and multiplies them by their gate, or adds its values before that."""
    value_dim, key_dim, width, is_delta, has_sigmoid = (
        rule.value_dim, rule.key_dim, rule.width, rule.is_delta, rule.has_sigmoid,
    )  # fmt: skip
    num_values, lanes = rule.run * value_dim, lanes_of(value_dim, 16)
    wide, stored = vectors(lanes), vectors(lanes, rule.dtype)
    splat, mul, div, add, sub, fma, larger, exp, total = (
        wide.splat, wide.mul, wide.div, wide.add, wide.sub, wide.fma, wide.max, wide.exp, wide.sum,
    )  # fmt: skip
    load, load_row, store_row = wide.load, stored.load, stored.store
    size = np.float32(value_dim)

    @kernel()
    def finish(args: Any, floats: Any, memory: Any, place: Any) -> None:
        mixed, outputs = memory
        first, count, step, channels, own, local = place
        skips = carray(as_pointer(args[SKIPS]), (args[HEADS],), np.float32)
        for index in range(count):
            begin = index * num_values + local * value_dim
            factor = splat(_ONE)
            if is_delta:
                squares = splat(_ZERO)
                for at in range(begin, begin + value_dim, lanes):
                    squares = fma(load(outputs, at), load(outputs, at), squares)
                factor = splat(_ONE / np.sqrt(total(squares) / size + floats[2 * EPS]))
            gate_at = (first + index) * step + channels + own * value_dim
            out_at = ((first + index) * args[HEADS] + own) * value_dim
            value_at = index * width + 2 * key_dim + local * value_dim
            for at in range(0, value_dim, lanes):
                number = load(outputs, begin + at)
                if is_delta:
                    number = mul(mul(number, factor), load(args[WEIGHT], at))
                else:
                    number = fma(splat(skips[own]), load(mixed, value_at + at), number)
                gate = mul(load_row(args[ROWS], gate_at + at), splat(floats[2 * GATE_SCALE]))
                inverse = add(splat(_ONE), exp(sub(splat(_ZERO), larger(gate, splat(_LOWEST)))))
                if has_sigmoid:
                    store_row(args[OUT], out_at + at, div(number, inverse))
                else:
                    store_row(args[OUT], out_at + at, mul(number, div(gate, inverse)))

    return finish
