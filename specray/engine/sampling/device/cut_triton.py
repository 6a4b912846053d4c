"""Top-k, top-p and min-p as one Triton kernel, without a sort. Importing it needs triton.

What is kept of a row is everything above a threshold, so the threshold is found by a radix search over the
bits of the numbers: eight passes, each of which narrows it to one sixteenth. The search looks for the largest
number such that what is no smaller reaches a goal: a count for top-k, a share of the probability for top-p.
One program does a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specray.engine.sampling.device.draw_triton import load_number

_LOWEST = tl.constexpr(-2147483648)


@triton.jit
def _order_of(number):
    """Integers, int64 within 32 bits, that are ordered as the numbers are; both zeros are one."""
    bits = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 2147483647)).to(tl.int64)


@triton.jit
def _number_of(order):
    """The inverse of ``_order_of``."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(number, anchor, IS_COUNT: tl.constexpr):
    weights = tl.full(number.shape, 1.0, tl.float64)
    if not IS_COUNT:
        weights = tl.exp(number.to(tl.float64) - anchor)
    return weights


@triton.jit
def _search(
    row_logits, divisor, anchor, floor, goal, vocab_size, IS_COUNT: tl.constexpr, LANES: tl.constexpr
):
    """The largest order such that the weights from it on reach ``goal``, among those above ``floor``.

    Returns:
        The order, the weight above it, and whether the goal was reached at all.
    """
    lane = tl.arange(0, LANES)
    digit = tl.arange(0, 16)
    low = tl.full([], _LOWEST, tl.int64)
    above = tl.full([], 0.0, tl.float64)
    whole = tl.full([], 0.0, tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        sums = tl.zeros([LANES, 16], tl.float64)
        for at in range(0, vocab_size, LANES):
            number = load_number(row_logits, at + lane, vocab_size, divisor, 0.0, 0, False)
            order = _order_of(number)
            bucket = (order - low) >> shift
            is_in = (bucket >= 0) & (bucket < 16) & (order > floor) & (at + lane < vocab_size)
            # After some passes hardly any number is in the interval, and most exponentials can be left out.
            if tl.max(is_in.to(tl.int32), 0) > 0:
                weight = tl.where(is_in, _weights(number, anchor, IS_COUNT), 0.0)
                sums += tl.where(bucket[:, None] == digit[None, :], weight[:, None], 0.0)
        by_digit = tl.sum(sums, 0)
        # For each digit the weight from it on.
        reached = above + tl.sum(tl.where(digit[None, :] >= digit[:, None], by_digit[None, :], 0.0), 1)
        chosen = tl.max(tl.where(reached >= goal, digit, 0), 0)
        if step == 0:
            whole = tl.sum(by_digit, 0)
        above += tl.sum(tl.where(digit > chosen, by_digit, 0.0), 0)
        low += chosen.to(tl.int64) << shift
    return low, above, whole >= goal


@triton.jit
def _count_equal(row_logits, divisor, order, vocab_size, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    count = tl.zeros([LANES], tl.int32)
    for at in range(0, vocab_size, LANES):
        number = load_number(row_logits, at + lane, vocab_size, divisor, 0.0, 0, False)
        count += ((_order_of(number) == order) & (at + lane < vocab_size)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _find_equal(row_logits, divisor, order, wanted, vocab_size, LANES: tl.constexpr):
    """The token id of the number that is the ``wanted``-th of an order, counted from 1."""
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


@triton.jit(
    do_not_specialize=["vocab_size"],
    do_not_specialize_on_alignment=[
        "logits",
        "divisors",
        "top_k",
        "top_p",
        "log_min_p",
        "thresholds",
        "last_tied",
    ],
)
def cut_kernel(
    logits,
    divisors,
    top_k,
    top_p,
    log_min_p,
    thresholds,
    last_tied,
    vocab_size,
    LANES: tl.constexpr,
):
    """The cut of one row; see ``rows.Cut``."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * vocab_size
    divisor = tl.load(divisors + row).to(tl.float32)
    count = tl.load(top_k + row)
    share = tl.load(top_p + row)
    margin = tl.load(log_min_p + row).to(tl.float32)
    has_count = (count > 0) & (count < vocab_size)
    lane = tl.arange(0, LANES)
    threshold = tl.full([], float("-inf"), tl.float32)
    last = tl.full([], 0, tl.int32) + vocab_size
    if has_count | (share < 1.0) | (margin > float("-inf")):
        highest = tl.full([LANES], float("-inf"), tl.float32)
        for at in range(0, vocab_size, LANES):
            number = load_number(row_logits, at + lane, vocab_size, divisor, 0.0, 0, False)
            highest = tl.maximum(highest, number)
        top = tl.max(highest, 0)
        anchor = top.to(tl.float64)
        # What top-k leaves: all orders above a floor, and of those at the floor some.
        floor = tl.full([], _LOWEST - 1, tl.int64)
        num_tied = tl.full([], 0, tl.int32)
        order = floor
        if has_count:
            floor, above, _ = _search(
                row_logits, divisor, anchor, floor, count.to(tl.float64), vocab_size, True, LANES
            )
            num_tied = (count - above.to(tl.int64)).to(tl.int32)
            order = floor
        if share < 1.0:
            total = tl.zeros([LANES], tl.float64)
            for at in range(0, vocab_size, LANES):
                number = load_number(row_logits, at + lane, vocab_size, divisor, 0.0, 0, False)
                is_above = (_order_of(number) > floor) & (at + lane < vocab_size)
                total += tl.where(is_above, tl.exp(number.to(tl.float64) - anchor), 0.0)
            at_floor = tl.full([], 0.0, tl.float64)
            if has_count:
                at_floor = tl.exp(_number_of(floor).to(tl.float64) - anchor)
            total_above = tl.sum(total, 0)
            goal = share * (total_above + num_tied.to(tl.float64) * at_floor)
            found, above, is_reached = _search(
                row_logits, divisor, anchor, floor, goal, vocab_size, False, LANES
            )
            if is_reached | (has_count == 0):
                order = found
                num_tied = _count_equal(row_logits, divisor, found, vocab_size, LANES)
            else:
                above = total_above
            each = tl.exp(_number_of(order).to(tl.float64) - anchor)
            needed = tl.ceil((goal - above) / tl.where(each > 0.0, each, 1.0))
            needed = tl.minimum(tl.maximum(needed, 1.0), num_tied.to(tl.float64))
            num_tied = needed.to(tl.int32)
        if has_count | (share < 1.0):
            threshold = _number_of(order)
            if num_tied < _count_equal(row_logits, divisor, order, vocab_size, LANES):
                last = _find_equal(row_logits, divisor, order, num_tied, vocab_size, LANES)
        least = top + margin
        if least > threshold:
            threshold = least
            last = tl.full([], 0, tl.int32) + vocab_size
    tl.store(thresholds + row, threshold)
    tl.store(last_tied + row, last)
