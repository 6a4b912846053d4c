"""The noise of ``noise`` as Triton functions, and kernels that write it. Importing it needs triton.

Words are integers and exactly those of the other forms. Gumbel numbers take the same two float64 logarithms,
of which devices may differ by a unit in the last place: two scores would have to lie closer than 1e-15 for
another token to be drawn.

No kernel of sampling is specialized: whatever was compiled when the kernels were tried serves every step.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton
import triton.language as tl

from specray.engine.sampling import noise

_MULTIPLIER_0 = tl.constexpr(noise.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIERS[1])
_WEYL_0 = tl.constexpr(noise.WEYL[0])
_WEYL_1 = tl.constexpr(noise.WEYL[1])
_TAG = tl.constexpr(noise.KEY_TAG)
_NUM_ROUNDS = tl.constexpr(noise.NUM_ROUNDS)


def compiled_once(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` of a kernel that is specialized on nothing but its constants.

    Args:
        numbers: names of the arguments that are whole numbers; the others are addresses.
    """

    def made(kernel: Callable[..., Any]) -> Any:
        named = {*numbers, *kernel.__annotations__}
        addresses = [name for name in signature(kernel).parameters if name not in named]
        return triton.jit(kernel, do_not_specialize=list(numbers), do_not_specialize_on_alignment=addresses)

    return made


@triton.jit
def philox(block, seed, position, purpose):
    """Four words of each block; all are uint64."""
    c0 = block
    c3 = block ^ block
    c1 = c3 + position
    c2 = c3 + purpose
    k0 = seed
    k1 = tl.full([], _TAG, tl.uint64)
    multiplier0 = tl.full([], _MULTIPLIER_0, tl.uint64)
    multiplier1 = tl.full([], _MULTIPLIER_1, tl.uint64)
    weyl0 = tl.full([], _WEYL_0, tl.uint64)
    weyl1 = tl.full([], _WEYL_1, tl.uint64)
    for _ in tl.static_range(_NUM_ROUNDS):
        high0 = tl.umulhi(c0, multiplier0)
        low0 = c0 * multiplier0
        high1 = tl.umulhi(c2, multiplier1)
        low1 = c2 * multiplier1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + weyl0
        k1 = k1 + weyl1
    return c0, c1, c2, c3


@triton.jit
def load_key(keys, row):
    """Seed, position and purpose of a row, uint64; and whether it has noise."""
    seed = tl.load(keys + row * 3).to(tl.uint64, bitcast=True)
    position = tl.load(keys + row * 3 + 1).to(tl.uint64, bitcast=True)
    purpose = tl.load(keys + row * 3 + 2)
    return seed, position, purpose.to(tl.uint64, bitcast=True), purpose >= 0


@triton.jit
def gumbel_of(word):
    """Gumbel numbers, float64, of words."""
    uniform = ((word >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@compiled_once("width")
def words_kernel(keys, token_ids, out, width, SIZE: tl.constexpr):
    """Words of some tokens of each row, one program a row and part."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    token = tl.load(token_ids + row * width + column, mask=column < width, other=0)
    seed, position, purpose, _ = load_key(keys, row)
    block = ((token >> 2) + 1).to(tl.uint64, bitcast=True)
    word0, word1, word2, word3 = philox(block, seed, position, purpose)
    place = token & 3
    word = tl.where(place == 0, word0, tl.where(place == 1, word1, tl.where(place == 2, word2, word3)))
    tl.store(out + row * width + column, word.to(tl.int64, bitcast=True), mask=column < width)


@compiled_once("vocab_size")
def gumbel_kernel(keys, out, vocab_size, LANES: tl.constexpr):
    """Gumbel numbers of a part of a row, four tokens a lane."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    token = lane * 4
    target = out + row * vocab_size
    seed, position, purpose, has_noise = load_key(keys, row)
    if has_noise:
        block = (lane + 1).to(tl.uint64)
        word0, word1, word2, word3 = philox(block, seed, position, purpose)
        tl.store(target + token, gumbel_of(word0), mask=token < vocab_size)
        tl.store(target + token + 1, gumbel_of(word1), mask=token + 1 < vocab_size)
        tl.store(target + token + 2, gumbel_of(word2), mask=token + 2 < vocab_size)
        tl.store(target + token + 3, gumbel_of(word3), mask=token + 3 < vocab_size)
    else:
        nothing = tl.zeros([LANES], tl.float64)
        tl.store(target + token, nothing, mask=token < vocab_size)
        tl.store(target + token + 1, nothing, mask=token + 1 < vocab_size)
        tl.store(target + token + 2, nothing, mask=token + 2 < vocab_size)
        tl.store(target + token + 3, nothing, mask=token + 3 < vocab_size)
