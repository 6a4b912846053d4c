"""Draws as Triton kernels: noise, sum and argmax in one pass over a row's logits. Importing it needs triton.

A row is split over several programs, so that few rows fill a device; a second kernel joins the parts. Each
lane of a program takes the four tokens of one Philox block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specray.engine.sampling.device.philox_triton import compiled_once, gumbel_of, load_key, philox

_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def load_number(row_logits, token, end, divisor, threshold, last_tied, HAS_CUT: tl.constexpr):
    """Processed logits, float32; minus infinity where the tail is cut and from ``end`` on."""
    number = tl.load(row_logits + token, mask=token < end, other=float("-inf"))
    number = tl.div_rn(number, divisor + tl.zeros_like(number))
    if HAS_CUT:
        is_kept = (number > threshold) | ((number == threshold) & (token <= last_tied))
        number = tl.where(is_kept, number, float("-inf"))
    return number


@triton.jit
def _take(score, token, highest, chosen, total, IS_JUDGED: tl.constexpr):
    is_better = score > highest
    if IS_JUDGED:
        higher = tl.where(is_better, score, highest)
        # Where nothing was seen yet: minus infinity less itself would be no number.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(2.0 * (highest - anchor).to(tl.float32))
        total = total * kept + tl.exp(2.0 * (score - anchor).to(tl.float32))
    return tl.where(is_better, score, highest), tl.where(is_better, token, chosen), total


@compiled_once("vocab_size", "split_size", "first_block")
def draw_kernel(
    logits, keys, divisors, thresholds, last_tied, best, where, totals, vocab_size, split_size, first_block,
    HAS_CUT: tl.constexpr, IS_JUDGED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best score of a part of a row, its token, and the sum of exp(2 * (score - best)).

    Of a row of some tokens, ``first_block`` is the first one's place among the blocks of four.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    place = row * tl.num_programs(1) + split
    row_logits = logits + row * vocab_size
    divisor = tl.load(divisors + row).to(tl.float32)
    threshold = 0.0
    last = 0
    if HAS_CUT:
        threshold = tl.load(thresholds + row)
        last = tl.load(last_tied + row)
    seed, position, purpose, has_noise = load_key(keys, row)
    first = split * split_size
    end = tl.minimum(first + split_size, vocab_size)
    lane = tl.arange(0, LANES)
    highest = tl.full([LANES], float("-inf"), tl.float64)
    chosen = first + lane * 4
    total = tl.zeros([LANES], tl.float32)
    for at in range(first, end, 4 * LANES):
        token = at + lane * 4
        number0 = load_number(row_logits, token, end, divisor, threshold, last, HAS_CUT).to(tl.float64)
        number1 = load_number(row_logits, token + 1, end, divisor, threshold, last, HAS_CUT).to(tl.float64)
        number2 = load_number(row_logits, token + 2, end, divisor, threshold, last, HAS_CUT).to(tl.float64)
        number3 = load_number(row_logits, token + 3, end, divisor, threshold, last, HAS_CUT).to(tl.float64)
        if has_noise:
            block = ((token >> 2) + 1 + first_block).to(tl.uint64)
            word0, word1, word2, word3 = philox(block, seed, position, purpose)
            number0 += gumbel_of(word0)
            number1 += gumbel_of(word1)
            number2 += gumbel_of(word2)
            number3 += gumbel_of(word3)
        highest, chosen, total = _take(number0, token, highest, chosen, total, IS_JUDGED)
        highest, chosen, total = _take(number1, token + 1, highest, chosen, total, IS_JUDGED)
        highest, chosen, total = _take(number2, token + 2, highest, chosen, total, IS_JUDGED)
        highest, chosen, total = _take(number3, token + 3, highest, chosen, total, IS_JUDGED)
    top = tl.max(highest, 0)
    tl.store(best + place, top)
    # Of equal scores the first token's counts.
    tl.store(where + place, tl.min(tl.where(highest == top, chosen, _NO_TOKEN), 0))
    if IS_JUDGED:
        anchor = tl.where(top == float("-inf"), 0.0, top)
        tl.store(totals + place, tl.sum(total * tl.exp(2.0 * (highest - anchor).to(tl.float32)), 0))


@compiled_once("num_splits", "vocab_size")
def join_kernel(
    best, where, totals, tokens, leads, num_splits, vocab_size, IS_JUDGED: tl.constexpr, SPLITS: tl.constexpr
):
    """The best token of a row from those of its parts."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    score = tl.load(best + row * num_splits + split, mask=is_split, other=float("-inf"))
    token = tl.load(where + row * num_splits + split, mask=is_split, other=_NO_TOKEN)
    top = tl.max(score, 0)
    first = tl.min(tl.where(score == top, token, _NO_TOKEN), 0)
    tl.store(tokens + row, tl.minimum(first, vocab_size - 1).to(tl.int64))
    if IS_JUDGED:
        part = tl.load(totals + row * num_splits + split, mask=is_split, other=0.0)
        share = part * tl.exp(2.0 * (score - top).to(tl.float32))
        tl.store(leads + row, -tl.log(tl.sum(tl.where(is_split, share, 0.0), 0)))
    else:
        tl.store(leads + row, 0.0)


@compiled_once("vocab_size", "split_size")
def sums_kernel(
    logits, divisors, thresholds, last_tied, highest_out, sums_out, vocab_size, split_size,
    HAS_CUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The largest logit of a part of a row, and the float64 sum of exp(logit - largest)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    place = row * tl.num_programs(1) + split
    row_logits = logits + row * vocab_size
    divisor = tl.load(divisors + row).to(tl.float32)
    threshold = 0.0
    last = 0
    if HAS_CUT:
        threshold = tl.load(thresholds + row)
        last = tl.load(last_tied + row)
    first = split * split_size
    end = tl.minimum(first + split_size, vocab_size)
    lane = tl.arange(0, LANES)
    highest = tl.full([LANES], float("-inf"), tl.float32)
    for at in range(first, end, LANES):
        number = load_number(row_logits, at + lane, end, divisor, threshold, last, HAS_CUT)
        highest = tl.maximum(highest, number)
    top = tl.max(highest, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    total = tl.zeros([LANES], tl.float64)
    for at in range(first, end, LANES):
        number = load_number(row_logits, at + lane, end, divisor, threshold, last, HAS_CUT)
        total += tl.exp(number.to(tl.float64) - anchor)
    tl.store(highest_out + place, top)
    tl.store(sums_out + place, tl.sum(total, 0))


@compiled_once("num_splits")
def join_sums_kernel(highest, sums, largest, total, num_splits, SPLITS: tl.constexpr):
    """A row's largest logit and sum from those of its parts."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    each = tl.load(highest + row * num_splits + split, mask=is_split, other=float("-inf"))
    part = tl.load(sums + row * num_splits + split, mask=is_split, other=0.0)
    top = tl.max(each, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    scaled = part * tl.exp(each.to(tl.float64) - anchor.to(tl.float64))
    tl.store(largest + row, top)
    tl.store(total + row, tl.sum(scaled, 0))


@triton.jit
def _score_residual(number, taken, word, anchor, total):
    prob = tl.exp(number.to(tl.float64) - anchor) / total
    left = prob - taken
    noise = gumbel_of(word)
    score = tl.where(left > 0.0, tl.log(tl.where(left > 0.0, left, 1.0)), float("-inf")) + noise
    own = tl.where(prob > 0.0, tl.log(tl.where(prob > 0.0, prob, 1.0)), float("-inf")) + noise
    return score, own


@compiled_once("vocab_size", "split_size")
def residual_kernel(
    logits, rows, keys, divisors, thresholds, last_tied, largest, totals, draft_probs, best, where, own_best,
    own_where, vocab_size, split_size, HAS_CUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best token of a part of a sequence's residual distribution, and of its row's own."""
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    place = sequence * tl.num_programs(1) + split
    row = tl.load(rows + sequence)
    row_logits = logits + row * vocab_size
    row_taken = draft_probs + sequence * vocab_size
    divisor = tl.load(divisors + row).to(tl.float32)
    anchor = tl.load(largest + row).to(tl.float64)
    total = tl.load(totals + row)
    threshold = 0.0
    last = 0
    if HAS_CUT:
        threshold = tl.load(thresholds + row)
        last = tl.load(last_tied + row)
    seed, position, purpose, _ = load_key(keys, sequence)
    first = split * split_size
    end = tl.minimum(first + split_size, vocab_size)
    lane = tl.arange(0, LANES)
    highest = tl.full([LANES], float("-inf"), tl.float64)
    chosen = first + lane * 4
    own_highest = highest
    own_chosen = chosen
    unused = tl.zeros([LANES], tl.float32)
    for at in range(first, end, 4 * LANES):
        token = at + lane * 4
        block = ((token >> 2) + 1).to(tl.uint64)
        word0, word1, word2, word3 = philox(block, seed, position, purpose)
        for index in tl.static_range(4):
            word = word0 if index == 0 else (word1 if index == 1 else (word2 if index == 2 else word3))
            own_token = token + index
            number = load_number(row_logits, own_token, end, divisor, threshold, last, HAS_CUT)
            taken = tl.load(row_taken + own_token, mask=own_token < end, other=0.0)
            score, own = _score_residual(number, taken, word, anchor, total)
            highest, chosen, unused = _take(score, own_token, highest, chosen, unused, False)
            own_highest, own_chosen, unused = _take(own, own_token, own_highest, own_chosen, unused, False)
    top = tl.max(highest, 0)
    tl.store(best + place, top)
    tl.store(where + place, tl.min(tl.where(highest == top, chosen, _NO_TOKEN), 0))
    own_top = tl.max(own_highest, 0)
    tl.store(own_best + place, own_top)
    tl.store(own_where + place, tl.min(tl.where(own_highest == own_top, own_chosen, _NO_TOKEN), 0))


@compiled_once("num_splits", "vocab_size")
def join_residual_kernel(
    best, where, own_best, own_where, tokens, num_splits, vocab_size, SPLITS: tl.constexpr
):
    """A sequence's token from those of its parts; from the row's own where the residual leaves nothing."""
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    place = sequence * num_splits + split
    score = tl.load(best + place, mask=is_split, other=float("-inf"))
    token = tl.load(where + place, mask=is_split, other=_NO_TOKEN)
    own_score = tl.load(own_best + place, mask=is_split, other=float("-inf"))
    own_token = tl.load(own_where + place, mask=is_split, other=_NO_TOKEN)
    top = tl.max(score, 0)
    own_top = tl.max(own_score, 0)
    first = tl.min(tl.where(score == top, token, _NO_TOKEN), 0)
    own_first = tl.min(tl.where(own_score == own_top, own_token, _NO_TOKEN), 0)
    chosen = tl.where(top == float("-inf"), own_first, first)
    tl.store(tokens + sequence, tl.minimum(chosen, vocab_size - 1).to(tl.int64))
