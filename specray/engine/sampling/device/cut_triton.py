"""Top-k, top-p and min-p as Triton kernels, without a sort. Importing it needs triton.

What is kept of a row is everything above a threshold, so the threshold is found by a radix search over the
bits of the numbers: eight steps, each of which narrows it to one sixteenth. The search looks for the largest
number such that what is no smaller reaches a goal: a count for top-k, then a share of the probability of what
top-k leaves for top-p. In each step the parts of a row are counted by programs of their own; the next step's
programs add up the parts.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from specray.engine.sampling.device.draw_triton import load_number
from specray.engine.sampling.device.philox_triton import compiled_once

SEARCH_STEPS: Final = 8
"""Steps of one search."""
DIGIT_BITS: Final = 4
NUM_BINS: Final = 1 << DIGIT_BITS
NUM_LOADS: Final = 4
"""Loads of a program at a time."""
NUM_INTS: Final = 5
"""Integers of a row's state: lowest order that is still searched, tokens above all that are, order below
which top-k cuts, tokens at that order, and how many of them are kept."""
NUM_FLOATS: Final = 3
"""Floats of a row's state: weight above all that is searched, the goal, weight above top-k's cut."""

_BITS = tl.constexpr(DIGIT_BITS)
_BINS = tl.constexpr(NUM_BINS)
_STEPS = tl.constexpr(SEARCH_STEPS)
_LOADS = tl.constexpr(NUM_LOADS)
_INTS = tl.constexpr(NUM_INTS)
_FLOATS = tl.constexpr(NUM_FLOATS)
_LOWEST = tl.constexpr(-2147483648)
# No number has this order, not even minus infinity: it is that of no number at all.


@triton.jit
def _order_of(number):
    """Integers, int32, that are ordered as the numbers are; both zeros are one."""
    bits = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def _number_of(order):
    """The inverse of ``_order_of``."""
    return (order ^ ((order >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(number, anchor):
    """Unnormalised probability, float64."""
    return tl.exp(number.to(tl.float64) - anchor)


@triton.jit
def _load_digits(row_logits, token, end, divisor, floor, low, shift):
    """Numbers, and of each the digit at ``shift`` of its order's distance from ``low``.

    The digit is ``_BINS`` for what is not searched.
    """
    number = load_number(row_logits, token, end, divisor, 0.0, 0, False)
    order = _order_of(number)
    digit = (order.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)) >> shift.to(tl.uint32)
    is_searched = (token < end) & (order > floor) & (digit < _BINS)
    return number, tl.where(is_searched, digit, _BINS).to(tl.int32)


@triton.jit
def _fold(ints, floats, counts, weights, row, is_count, shift, num_splits, SPLITS: tl.constexpr):
    """A row's search after a step, from its state before and the step's counts.

    Returns:
        The lowest order that is still searched, the tokens and the weight above all that are, and the number
        of tokens that are: after the last step those of the order that was found.
    """
    low = tl.load(ints + row * _INTS)
    above_count = tl.load(ints + row * _INTS + 1)
    above_weight = tl.load(floats + row * _FLOATS)
    goal = tl.load(floats + row * _FLOATS + 1)
    split = tl.arange(0, SPLITS)[:, None]
    digit = tl.arange(0, _BINS)
    place = (row * num_splits + split) * _BINS + digit[None, :]
    count = tl.sum(tl.load(counts + place, mask=split < num_splits, other=0), 0)
    weight = tl.sum(tl.load(weights + place, mask=split < num_splits, other=0.0), 0)
    measured = weight
    reached = above_weight
    if is_count:
        measured = count.to(tl.float64)
        reached = above_count.to(tl.float64)
    from_on = reached + tl.cumsum(measured, 0, reverse=True)
    chosen = tl.max(tl.where(from_on >= goal, digit, 0), 0)
    above_count += tl.sum(tl.where(digit > chosen, count, 0), 0)
    above_weight += tl.sum(tl.where(digit > chosen, weight, 0.0), 0)
    num_searched = tl.sum(tl.where(digit == chosen, count, 0), 0)
    return low + (chosen << shift), above_count, above_weight, num_searched


@compiled_once("step", "shift", "vocab_size", "split_size")
def narrow_kernel(
    logits, divisors, top_k, top_p, largest, totals, ints, floats, counts, weights, step, shift, vocab_size,
    split_size, LANES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Counts a part of a row for one step of the search: tokens and weight by digit.

    States and counts have a slot for each step; ``shift`` is the lowest bit of the step's digits. The first
    program of a row writes its state: all of them make the same of the counts before. Steps from
    ``SEARCH_STEPS`` on search for top-p.
    """
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    count = tl.load(top_k + row)
    has_count = (count > 0) & (count < vocab_size)
    share = tl.load(top_p + row)
    is_searched = has_count
    if step >= _STEPS:
        is_searched = share < 1.0
    if is_searched:
        anchor = tl.load(largest + row).to(tl.float64)
        own_ints = ints + (step * num_rows + row) * _INTS
        own_floats = floats + (step * num_rows + row) * _FLOATS
        low = tl.full([], _LOWEST, tl.int32)
        above_count = tl.full([], 0, tl.int32)
        above_weight = tl.full([], 0.0, tl.float64)
        floor = low
        at_floor = above_count
        num_kept = above_count
        above_floor = tl.load(totals + row)
        goal = count.to(tl.float64)
        if step > 0:
            before = (step - 1) * num_rows
            if (step != _STEPS) | has_count:
                low, above_count, above_weight, num_searched = _fold(
                    ints + before * _INTS,
                    floats + before * _FLOATS,
                    counts + before * num_splits * _BINS,
                    weights + before * num_splits * _BINS,
                    row,
                    step <= _STEPS,
                    tl.where(step == _STEPS, 0, shift + _BITS),
                    num_splits,
                    SPLITS,
                )
                if step == _STEPS:
                    floor = low
                    at_floor = num_searched
                    num_kept = count.to(tl.int32) - above_count
                    above_floor = above_weight
            if step == _STEPS:
                goal = share * above_floor
                if has_count:
                    each = _weight_of(_number_of(floor), anchor)
                    goal = share * (above_floor + num_kept.to(tl.float64) * each)
                low = tl.full([], _LOWEST, tl.int32)
                above_count = tl.full([], 0, tl.int32)
                above_weight = tl.full([], 0.0, tl.float64)
            else:
                floor = tl.load(ints + (before + row) * _INTS + 2)
                at_floor = tl.load(ints + (before + row) * _INTS + 3)
                num_kept = tl.load(ints + (before + row) * _INTS + 4)
                goal = tl.load(floats + (before + row) * _FLOATS + 1)
                above_floor = tl.load(floats + (before + row) * _FLOATS + 2)
        if split == 0:
            tl.store(own_ints, low)
            tl.store(own_ints + 1, above_count)
            tl.store(own_ints + 2, floor)
            tl.store(own_ints + 3, at_floor)
            tl.store(own_ints + 4, num_kept)
            tl.store(own_floats, above_weight)
            tl.store(own_floats + 1, goal)
            tl.store(own_floats + 2, above_floor)
        row_logits = logits + row * vocab_size
        divisor = tl.load(divisors + row).to(tl.float32)
        first = split * split_size
        end = tl.minimum(first + split_size, vocab_size)
        lane = tl.arange(0, LANES)
        digit = tl.arange(0, _BINS)
        # Lanes along the last dimension: each has all bins, so that an exponential is computed once.
        own_counts = tl.zeros([_BINS, LANES], tl.int32)
        own_weights = tl.zeros([_BINS, LANES], tl.float64)
        for at in range(first, end, _LOADS * LANES):
            # Several loads are on their way at once.
            least = tl.full([LANES], _BINS, tl.int32)
            for index in tl.static_range(_LOADS):
                token = at + index * LANES + lane
                _, own = _load_digits(row_logits, token, end, divisor, floor, low, shift)
                least = tl.minimum(least, own)
            # After some steps hardly any number is still searched, and most exponentials can be left out.
            if tl.min(least, 0) < _BINS:
                for index in tl.static_range(_LOADS):
                    token = at + index * LANES + lane
                    number, own = _load_digits(row_logits, token, end, divisor, floor, low, shift)
                    is_own = own[None, :] == digit[:, None]
                    own_counts += is_own.to(tl.int32)
                    own_weights += tl.where(is_own, _weight_of(number, anchor)[None, :], 0.0)
        place = ((step * num_rows + row) * num_splits + split) * _BINS + digit
        tl.store(counts + place, tl.sum(own_counts, 1))
        tl.store(weights + place, tl.sum(own_weights, 1))


@triton.jit
def _find_equal(row_logits, divisor, order, wanted, vocab_size, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    for at in range(0, vocab_size, LANES):
        token = at + lane
        number = load_number(row_logits, token, vocab_size, divisor, 0.0, 0, False)
        is_equal = ((_order_of(number) == order) & (token < vocab_size)).to(tl.int32)
        nth = seen + tl.cumsum(is_equal, 0)
        found = tl.maximum(found, tl.max(tl.where((is_equal > 0) & (nth == wanted), token, 0), 0))
        seen += tl.sum(is_equal, 0)
    return found


@compiled_once("vocab_size", "num_splits")
def finish_cut_kernel(
    logits, divisors, top_k, top_p, log_min_p, largest, ints, floats, counts, weights, thresholds, last_tied,
    vocab_size, num_splits, LANES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The cut of one row, after all steps; see ``rows.TailCut``."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    count = tl.load(top_k + row)
    has_count = (count > 0) & (count < vocab_size)
    has_share = tl.load(top_p + row) < 1.0
    top = tl.load(largest + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    last = tl.full([], 0, tl.int32) + vocab_size
    if has_count | has_share:
        step = tl.full([], _STEPS - 1, tl.int32)
        if has_share:
            step = tl.full([], 2 * _STEPS - 1, tl.int32)
        slot = step * num_rows
        order, above_count, above_weight, num_equal = _fold(
            ints + slot * _INTS,
            floats + slot * _FLOATS,
            counts + slot * num_splits * _BINS,
            weights + slot * num_splits * _BINS,
            row,
            has_share == 0,
            0,
            num_splits,
            SPLITS,
        )
        # Number of tokens to keep at the order that was found.
        num_kept = count.to(tl.int32) - above_count
        if has_share:
            goal = tl.load(floats + (slot + row) * _FLOATS + 1)
            above_floor = tl.load(floats + (slot + row) * _FLOATS + 2)
            num_kept = num_equal
            if has_count & (above_floor < goal):
                # All above top-k's cut is not enough, so the share ends among those at it.
                order = tl.load(ints + (slot + row) * _INTS + 2)
                num_equal = tl.load(ints + (slot + row) * _INTS + 3)
                num_kept = tl.load(ints + (slot + row) * _INTS + 4)
                above_weight = above_floor
            each = _weight_of(_number_of(order), top.to(tl.float64))
            needed = tl.ceil((goal - above_weight) / tl.where(each > 0.0, each, 1.0))
            needed = tl.minimum(tl.maximum(needed, 1.0), num_kept.to(tl.float64))
            num_kept = needed.to(tl.int32)
        threshold = _number_of(order)
        if num_kept < num_equal:
            divisor = tl.load(divisors + row).to(tl.float32)
            last = _find_equal(logits + row * vocab_size, divisor, order, num_kept, vocab_size, LANES)
    least = top + tl.load(log_min_p + row).to(tl.float32)
    if least > threshold:
        threshold = least
        last = tl.full([], 0, tl.int32) + vocab_size
    tl.store(thresholds + row, threshold)
    tl.store(last_tied + row, last)
