"""Top-k, top-p and min-p as one Triton kernel, without a sort. Importing it needs triton.

What is kept of a row is everything above a threshold, so the threshold is found by a radix search over the
bits of the numbers: eleven passes, each of which narrows it to one eighth. The search looks for the largest
number such that what is no smaller reaches a goal: a count for top-k, a share of the probability for top-p.
One program does a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specray.engine.sampling.device.draw_triton import load_number

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
def _digit_of(number, is_token, floor, low, shift):
    """The three bits at ``shift`` of a number's distance from ``low``; 8 for what is not searched."""
    order = _order_of(number)
    digit = (order.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)) >> shift.to(tl.uint32)
    return tl.where(is_token & (order > floor) & (digit < 8), digit, 8)


@triton.jit
def _add(number, digit, anchor, s0, s1, s2, s3, s4, s5, s6, s7, IS_COUNT: tl.constexpr):
    """Adds weights to the sum of their digit."""
    weight = tl.full(number.shape, 1.0, tl.float64)
    if not IS_COUNT:
        weight = tl.exp(number.to(tl.float64) - anchor)
    s0 += tl.where(digit == 0, weight, 0.0)
    s1 += tl.where(digit == 1, weight, 0.0)
    s2 += tl.where(digit == 2, weight, 0.0)
    s3 += tl.where(digit == 3, weight, 0.0)
    s4 += tl.where(digit == 4, weight, 0.0)
    s5 += tl.where(digit == 5, weight, 0.0)
    s6 += tl.where(digit == 6, weight, 0.0)
    s7 += tl.where(digit == 7, weight, 0.0)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def _search(
    row_logits, divisor, anchor, floor, goal, vocab_size, IS_COUNT: tl.constexpr, LANES: tl.constexpr
):
    """The largest order such that the weights from it on reach ``goal``, among those above ``floor``.

    Returns:
        The order, the weight above it, and whether the goal was reached at all.
    """
    lane = tl.arange(0, LANES)
    low = tl.full([], _LOWEST, tl.int32)
    above = tl.full([], 0.0, tl.float64)
    whole = tl.full([], 0.0, tl.float64)
    # Two bits first, then three at a time.
    shift = tl.full([], 30, tl.int32)
    for step in range(11):
        s0 = tl.zeros([LANES], tl.float64)
        s1 = s0
        s2 = s0
        s3 = s0
        s4 = s0
        s5 = s0
        s6 = s0
        s7 = s0
        for at in range(0, vocab_size, 4 * LANES):
            # Four loads are on their way at once.
            token = at + lane
            n0 = load_number(row_logits, token, vocab_size, divisor, 0.0, 0, False)
            n1 = load_number(row_logits, token + LANES, vocab_size, divisor, 0.0, 0, False)
            n2 = load_number(row_logits, token + 2 * LANES, vocab_size, divisor, 0.0, 0, False)
            n3 = load_number(row_logits, token + 3 * LANES, vocab_size, divisor, 0.0, 0, False)
            d0 = _digit_of(n0, token < vocab_size, floor, low, shift)
            d1 = _digit_of(n1, token + LANES < vocab_size, floor, low, shift)
            d2 = _digit_of(n2, token + 2 * LANES < vocab_size, floor, low, shift)
            d3 = _digit_of(n3, token + 3 * LANES < vocab_size, floor, low, shift)
            least = tl.min(tl.minimum(tl.minimum(d0, d1), tl.minimum(d2, d3)).to(tl.int32), 0)
            # After some passes hardly any number is still searched, and most exponentials can be left out.
            if least < 8:
                s0, s1, s2, s3, s4, s5, s6, s7 = _add(
                    n0, d0, anchor, s0, s1, s2, s3, s4, s5, s6, s7, IS_COUNT
                )
                s0, s1, s2, s3, s4, s5, s6, s7 = _add(
                    n1, d1, anchor, s0, s1, s2, s3, s4, s5, s6, s7, IS_COUNT
                )
                s0, s1, s2, s3, s4, s5, s6, s7 = _add(
                    n2, d2, anchor, s0, s1, s2, s3, s4, s5, s6, s7, IS_COUNT
                )
                s0, s1, s2, s3, s4, s5, s6, s7 = _add(
                    n3, d3, anchor, s0, s1, s2, s3, s4, s5, s6, s7, IS_COUNT
                )
        # For each digit the weight from it on.
        r7 = above + tl.sum(s7, 0)
        r6 = r7 + tl.sum(s6, 0)
        r5 = r6 + tl.sum(s5, 0)
        r4 = r5 + tl.sum(s4, 0)
        r3 = r4 + tl.sum(s3, 0)
        r2 = r3 + tl.sum(s2, 0)
        r1 = r2 + tl.sum(s1, 0)
        if step == 0:
            whole = r1 + tl.sum(s0, 0)
        chosen = (r1 >= goal).to(tl.int32) + (r2 >= goal).to(tl.int32) + (r3 >= goal).to(tl.int32)
        chosen += (r4 >= goal).to(tl.int32) + (r5 >= goal).to(tl.int32) + (r6 >= goal).to(tl.int32)
        chosen += (r7 >= goal).to(tl.int32)
        above = tl.where(chosen == 6, r7, above)
        above = tl.where(chosen == 5, r6, above)
        above = tl.where(chosen == 4, r5, above)
        above = tl.where(chosen == 3, r4, above)
        above = tl.where(chosen == 2, r3, above)
        above = tl.where(chosen == 1, r2, above)
        above = tl.where(chosen == 0, r1, above)
        low += chosen << shift
        shift -= 3
    return low, above, whole >= goal


@triton.jit
def _count_equal(row_logits, divisor, order, vocab_size, LANES: tl.constexpr):
    lane = tl.arange(0, 4 * LANES)
    count = tl.zeros([4 * LANES], tl.int32)
    for at in range(0, vocab_size, 4 * LANES):
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
    lane = tl.arange(0, 4 * LANES)
    threshold = tl.full([], float("-inf"), tl.float32)
    last = tl.full([], 0, tl.int32) + vocab_size
    if has_count | (share < 1.0) | (margin > float("-inf")):
        highest = tl.full([4 * LANES], float("-inf"), tl.float32)
        for at in range(0, vocab_size, 4 * LANES):
            number = load_number(row_logits, at + lane, vocab_size, divisor, 0.0, 0, False)
            highest = tl.maximum(highest, number)
        top = tl.max(highest, 0)
        anchor = top.to(tl.float64)
        # What top-k leaves: all orders above a floor, and of those at the floor some.
        floor = tl.full([], _LOWEST, tl.int32)
        num_tied = tl.full([], 0, tl.int32)
        order = floor
        if has_count:
            floor, above, _ = _search(
                row_logits, divisor, anchor, floor, count.to(tl.float64), vocab_size, True, LANES
            )
            num_tied = (count - above.to(tl.int64)).to(tl.int32)
            order = floor
        if share < 1.0:
            total = tl.zeros([4 * LANES], tl.float64)
            for at in range(0, vocab_size, 4 * LANES):
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
