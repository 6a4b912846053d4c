"""Gumbel-argmax sampling: each row's best token with noise, with exact noise only where a token can win.

Noise costs a Philox word (``sampling.noise``) and two logarithms per token: a fifth of a target's step for
256 rows of 4,096 tokens. A token's score is s = logit + g with g = -log(-log(u)) and u its uniform. Let M be
the best score so far, at first that of the token with the largest logit. Another token wins only if g >= M -
logit, that is -log(u) <= exp(logit - M). As -log(u) >= 1 - u, it wins only if 1 - u <= exp(logit - M). That
test takes one float32 exponential per token and leaves some dozen tokens, whose scores are computed in
float64: the chosen token is the same.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from specray.engine.cpu.compiled import CompiledFunction
from specray.engine.cpu.simd import Vector, kernel, vectors
from specray.engine.cpu.thread_pool import as_pointer
from specray.engine.sampling import noise

_LANES = 16
_WORDS = 4
"""Words of a Philox block."""
_ADDRESSES = 7
_SIGNATURE = types.void(*[types.int64] * (_ADDRESSES + 3))
_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (_ADDRESSES + 3))
_LEADS_SIGNATURE = types.void(*[types.int64] * 5)
_LEADS_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
_SLACK, _SLACK_PER_UNIT = 1e-5, 2.0**-21
"""Bounds on the float32 error: of an exponent, absolute; of a logit, relative to its size."""
_WORD = ir.IntType(64)
_U12, _ONE_WORD = np.uint64(12), np.uint64(1)
_U2, _LAST_PLACE = np.uint64(2), np.uint64(3)
"""Shift and mask that divide a token id by the words of a block."""


def gumbel_argmax(
    logits: torch.Tensor,
    keys: Sequence[tuple[int, int, int, int]],
    *,
    is_judged: bool,
    token_ids: NDArray[np.int64] | None = None,
) -> tuple[list[int], list[float]]:
    """Samples each row's token by adding Gumbel noise, and measures how far it leads.

    Args:
        logits: ``[len(keys), vocab_size]``, float32, contiguous, on CPU.
        keys: of each row, unsigned: the two words of its key, its position and its purpose.
        is_judged: whether to compute leads; False: all are 0.
        token_ids: of the logits, whose noise is meant, ascending; None: every token's own index.

    Returns:
        Tokens as indices into the rows, and their leads: the log of the token's share of the sum of
        exp(2 * score), where scores of other tokens are approximate.
    """
    assert logits.is_contiguous(), "rows must follow each other"
    assert logits.dtype == torch.float32, logits.dtype
    num_rows, size = logits.shape
    words = np.array(keys, dtype=np.uint64)
    # Start from the largest logits.
    tokens, leads = logits.numpy().argmax(-1).astype(np.int64), np.zeros(num_rows)
    scratch = np.empty(-(-size // _LANES) * _LANES, dtype=np.uint64)
    vector = np.empty(3 * _LANES, dtype=np.float32)
    assert token_ids is None or (token_ids.dtype == np.int64 and token_ids.shape == (size,)), token_ids
    ids_address = 0 if token_ids is None else token_ids.ctypes.data
    parts = (part.ctypes.data for part in (words, tokens, leads, scratch, vector))
    addresses = (logits.data_ptr(), ids_address, *parts)
    _gumbel_argmax_kernel().call(*addresses, num_rows, size, is_judged)
    return tokens.tolist(), leads.tolist()


def leads_of(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """The leads of the best tokens without noise: as in ``gumbel_argmax``, but exact.

    Args:
        logits: ``[len(tokens), vocab_size]``, float32, contiguous, on CPU.
        tokens: each row's best token.
    """
    assert logits.is_contiguous(), "rows must follow each other"
    assert logits.dtype == torch.float32, logits.dtype
    chosen, leads = np.array(tokens, dtype=np.int64), np.empty(len(tokens))
    _leads_kernel().call(logits.data_ptr(), chosen.ctypes.data, leads.ctypes.data, *logits.shape)
    values: list[float] = leads.tolist()
    return values


@functools.cache
def _gumbel_argmax_kernel() -> CompiledFunction:
    return CompiledFunction("gumbel_argmax", _SIGNATURE, _PROTOTYPE, _make_gumbel_argmax)


@functools.cache
def _leads_kernel() -> CompiledFunction:
    return CompiledFunction("leads", _LEADS_SIGNATURE, _LEADS_PROTOTYPE, _make_leads)


@intrinsic
def _product(context: Any, first: Any, second: Any) -> Any:
    """Multiplies unsigned words; returns the high and the low word, from one instruction."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)
        return context.make_tuple(builder, signature.return_type, (high, builder.trunc(product, _WORD)))

    return types.containers.UniTuple(types.uint64, 2)(types.uint64, types.uint64), code


def _make_fill() -> tuple[Any, Any]:
    """Makes two functions that fill in the Philox words of a row.

    ``(key, words)``: of all tokens from 0 on; ``(key, token_ids, words)``: of these, which ascend.
    """
    # Constants, though the cache key does not cover ``noise``: they are Philox's and will not change.
    first_factor, second_factor = (np.uint64(number) for number in noise.MULTIPLIERS)
    first_step, second_step = (np.uint64(number) for number in noise.WEYL)
    num_rounds = noise.NUM_ROUNDS

    @kernel()
    def philox(block: Any, position: Any, purpose: Any, key: Any, tag: Any) -> Any:
        a, b, c, d = block, position, purpose, np.uint64(0)
        for _ in range(num_rounds):
            high, low = _product(a, first_factor)
            other_high, other_low = _product(c, second_factor)
            a, b, c, d = other_high ^ b ^ key, other_low, high ^ d ^ tag, low
            key, tag = key + first_step, tag + second_step
        return a, b, c, d

    @kernel()
    def fill(key: Any, words: Any) -> None:
        for first in range(0, len(words), _WORDS):
            block = np.uint64(first // _WORDS) + _ONE_WORD
            words[first], words[first + 1], words[first + 2], words[first + 3] = philox(
                block, key[2], key[3], key[0], key[1]
            )

    @kernel()
    def fill_at(key: Any, token_ids: Any, words: Any) -> None:
        # No token is in block 0: blocks count from 1.
        known, zero = np.uint64(0), np.uint64(0)
        a, b, c, d = zero, zero, zero, zero
        for index in range(len(token_ids)):
            token = np.uint64(token_ids[index])
            block = (token >> _U2) + _ONE_WORD
            if block != known:
                a, b, c, d = philox(block, key[2], key[3], key[0], key[1])
                known = block
            place = token & _LAST_PLACE
            words[index] = a if place == 0 else b if place == 1 else c if place == 2 else d
        for index in range(len(token_ids), len(words)):
            words[index] = zero

    return fill, fill_at


@kernel()
def _lowered(bound: float) -> float:
    """Lowers a score by the float32 error bound."""
    return bound - (_SLACK + _SLACK_PER_UNIT * abs(bound))


@kernel()
def _score(logit: Any, word: Any) -> Any:
    uniform = (np.float64(word >> _U12) + 0.5) * 2.0**-52
    return np.float64(logit) - math.log(-math.log(uniform))


def _lacking_kernel() -> Any:
    """Makes ``(address, index)``: 1 - u of sixteen words from the index on, as float32 >= 0.

    Off by at most half of the last bit.
    """
    words, floats = ir.VectorType(_WORD, _LANES), ir.VectorType(ir.FloatType(), _LANES)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.add(args[0], builder.mul(args[1], ir.Constant(_WORD, 8)))
        value = builder.load(builder.inttoptr(place, words.as_pointer()))
        value.align = 8
        value = builder.lshr(builder.not_(value), ir.Constant(words, [12] * _LANES))
        return builder.fmul(builder.sitofp(value, floats), ir.Constant(floats, [2.0**-52] * _LANES))

    def lacking(context: Any, address: Any, index: Any) -> Any:
        return Vector(_LANES)(types.int64, types.int64), code

    return intrinsic(lacking)


def _make_gumbel_argmax() -> Any:
    (fill, fill_at), lacking, wide = _make_fill(), _lacking_kernel(), vectors(_LANES, "float32")
    load, store, splat, add, sub, mul, div, exp, total, largest = (
        wide.load, wide.store, wide.splat, wide.add, wide.sub, wide.mul, wide.div, wide.exp, wide.sum,
        wide.largest,
    )  # fmt: skip
    zero, six, four = np.float32(0.0), np.float32(6.0), np.float32(4.0)

    @kernel()
    def minus_log(x: Any) -> Any:
        """Approximates -log(1 - x) by a Pade formula: 1 % too small at 0.8, finite at 1."""
        return div(mul(x, sub(splat(six), x)), sub(splat(six), mul(splat(four), x)))

    def choose(
        logits: int, token_ids: int, keys: int, tokens: int, leads: int, scratch: int, vector: int,
        num_rows: int, size: int, is_judged: int,
    ) -> None:  # fmt: skip
        padded = (size + _LANES - 1) // _LANES * _LANES
        all_keys = carray(as_pointer(keys), (num_rows, 4), np.uint64)
        all_logits = carray(as_pointer(logits), (num_rows, size), np.float32)
        all_tokens = carray(as_pointer(tokens), (num_rows,), np.int64)
        all_leads = carray(as_pointer(leads), (num_rows,), np.float64)
        all_ids = carray(as_pointer(token_ids), (size if token_ids != 0 else 0,), np.int64)
        words = carray(as_pointer(scratch), (padded,), np.uint64)
        # The last logits of a row padded with -inf; then scratch for sixteen tokens and their shares.
        last = carray(as_pointer(vector), (_LANES,), np.float32)
        left_address, share_address = vector + 4 * _LANES, vector + 8 * _LANES
        left = carray(as_pointer(left_address), (_LANES,), np.float32)
        some = carray(as_pointer(share_address), (_LANES,), np.float32)
        for row in range(num_rows):
            own, chosen = all_logits[row], all_tokens[row]
            if token_ids != 0:
                fill_at(all_keys[row], all_ids, words)
            else:
                fill(all_keys[row], words)
            for place in range(_LANES):
                token = padded - _LANES + place
                last[place] = own[token] if token < size else -np.inf
            best = _score(own[chosen], words[chosen])
            lowest = _lowered(best)
            weights, shares = 0.0, splat(zero)
            for first in range(0, padded, _LANES):
                source = vector if first + _LANES > size else logits + (row * size + first) * 4
                # 40 at most, since noise is above -3.7.
                limit, rest = exp(sub(load(source, 0), splat(np.float32(lowest)))), lacking(scratch, first)
                share = div(limit, minus_log(rest)) if is_judged else limit
                if largest(sub(limit, rest)) >= zero:
                    store(left_address, 0, sub(limit, rest))
                    store(share_address, 0, share)
                    for place in range(min(_LANES, size - first)):
                        if left[place] >= zero:
                            token = first + place
                            score = _score(own[token], words[token])
                            if score > best:
                                best, chosen = score, token
                            weights += math.exp(2.0 * (score - lowest))
                            some[place] = zero
                    share = load(share_address, 0)
                if is_judged:
                    shares = add(shares, mul(share, share))
                if _lowered(best) > lowest:
                    factor = math.exp(2.0 * (lowest - _lowered(best)))
                    weights, shares = weights * factor, mul(shares, splat(np.float32(factor)))
                    lowest = _lowered(best)
            all_tokens[row] = chosen
            if is_judged:
                all_leads[row] = 2.0 * (best - lowest) - math.log(weights + total(shares))

    return choose


def _make_leads() -> Any:
    wide = vectors(_LANES, "float32")
    load, splat, add, sub, mul, exp, total = (
        wide.load, wide.splat, wide.add, wide.sub, wide.mul, wide.exp, wide.sum,
    )  # fmt: skip

    def leads(logits: int, tokens: int, leads: int, num_rows: int, size: int) -> None:
        all_logits = carray(as_pointer(logits), (num_rows, size), np.float32)
        all_tokens = carray(as_pointer(tokens), (num_rows,), np.int64)
        all_leads = carray(as_pointer(leads), (num_rows,), np.float64)
        whole = size // _LANES * _LANES
        for row in range(num_rows):
            own = all_logits[row]
            best = own[all_tokens[row]]
            shares = splat(np.float32(0.0))
            for first in range(0, whole, _LANES):
                share = exp(sub(load(logits, row * size + first), splat(best)))
                shares = add(shares, mul(share, share))
            sum_of_all = np.float64(total(shares))
            for token in range(whole, size):
                sum_of_all += math.exp(2.0 * (np.float64(own[token]) - best))
            all_leads[row] = -math.log(sum_of_all)

    return leads
