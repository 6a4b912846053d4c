"""Online softmax of AMX attention: turns scores of sixteen queries at once into weights, chunk by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from specray.engine.cpu.attention import fields
from specray.engine.cpu.attention.amx.work import BLOCK, CHUNK, COLUMNS, Work, padded_len
from specray.engine.cpu.attention.attend import seen
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.transpose import transpose_to_bfloat16
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import as_pointer

_HIDDEN, _ZERO, _ONE = np.float32(-1e30), np.float32(0.0), np.float32(1.0)


@kernel()
def _hide(scores: Any, column: int, first: int, last: int, chunk: int, value: float) -> None:
    """Writes ``value`` for every token of the chunk outside of ``[first, last)``."""
    for token in range(min(len(scores), first - chunk)):
        scores[token, column] = value
    for token in range(max(0, last - chunk), len(scores)):
        scores[token, column] = value


@kernel()
def _hide_apart(
    args: Any, span: Any, work: Work, group: int, first_row: int, chunk: int, value: float
) -> None:
    place = work.scores + group * CHUNK * tiles.LINE
    scores = carray(as_pointer(place), (padded_len(work, chunk), COLUMNS), np.float32)
    # A group of several heads has the same rows for each; a group of one head has a part of its queries.
    index = group % work.groups_per_head * COLUMNS
    for column in range(min(COLUMNS, work.num_queries * work.heads_per_group - index)):
        row = first_row + (index + column) % work.num_queries // args[fields.GROUP_SIZE]
        # Of a tree's row the prefix alone: the chunks that rows share.
        first, last, _, _, _, _ = seen(args, span, row)
        _hide(scores, column, first, last, chunk, value)


@kernel()
def _is_plain(args: Any, span: Any) -> bool:
    """Whether rows see all earlier tokens: no window, no masks."""
    return bool(args[fields.WINDOW] == 0 and span[fields.FIRST_MASK] < 0)


def _hide_kernel() -> Any:
    wide = vectors(COLUMNS, "float32")
    load, store, splat, sub, larger, fma, mul = (
        wide.load, wide.store, wide.splat, wide.sub, wide.max, wide.fma, wide.mul
    )  # fmt: skip

    @kernel()
    def hide(
        args: Any, span: Any, work: Work, group: int, first_row: int, chunk: int, is_weight: bool
    ) -> None:
        """Masks tokens that a row does not see: scores become the lowest, weights 0."""
        if not _is_plain(args, span):
            value = _ZERO if is_weight else _HIDDEN
            _hide_apart(args, span, work, group, first_row, chunk, value)
            return
        place, first_own = work.scores + group * CHUNK * tiles.LINE, span[fields.START] + first_row
        last_seen, zero = load(work.last_seen, group * COLUMNS), splat(_ZERO)
        num_tokens, num_padded = min(CHUNK, work.end - chunk), padded_len(work, chunk)
        # Memory after the last token is undefined.
        for token in range(num_tokens, num_padded):
            store(place, token * COLUMNS, zero if is_weight else splat(_HIDDEN))
        # Tokens before the first row's own are seen by all rows.
        for token in range(max(0, first_own + 1 - chunk), num_tokens):
            # Distance after the last token that the query sees: 0 for those it sees.
            behind = larger(zero, sub(splat(np.float32(chunk + token)), last_seen))
            number = load(place, token * COLUMNS)
            if is_weight:
                number = mul(number, larger(zero, sub(splat(_ONE), behind)))
            else:
                number = fma(behind, splat(_HIDDEN), number)
            store(place, token * COLUMNS, number)

    return hide


def weigh_kernel() -> Any:
    wide, hide = vectors(COLUMNS, "float32"), _hide_kernel()
    load, store, splat, sub, larger, exp, fma, add = (
        wide.load, wide.store, wide.splat, wide.sub, wide.max, wide.exp, wide.fma, wide.add
    )  # fmt: skip

    @kernel()
    def weigh(args: Any, span: Any, work: Work, group: int, first_row: int, chunk: int) -> None:
        """Turns a group's scores into weights relative to the largest score so far."""
        place, num_tokens = work.scores + group * CHUNK * tiles.LINE, padded_len(work, chunk)
        hide(args, span, work, group, first_row, chunk, False)
        before = total = splat(_HIDDEN)
        if chunk > work.first:
            before, total = load(work.most, group * COLUMNS), load(work.totals, group * COLUMNS)
        # Two running maxima, to halve the dependency chain.
        most, other = before, load(place, 0)
        for token in range(0, num_tokens, 4):
            first, second = load(place, token * COLUMNS), load(place, (token + 1) * COLUMNS)
            third, fourth = load(place, (token + 2) * COLUMNS), load(place, (token + 3) * COLUMNS)
            most, other = larger(most, larger(first, second)), larger(other, larger(third, fourth))
        most = larger(most, other)
        factor = exp(sub(before, most))
        summed = sub(most, most)
        for token in range(num_tokens):
            weight = exp(sub(load(place, token * COLUMNS), most))
            store(place, token * COLUMNS, weight)
            summed = add(summed, weight)
        store(work.most, group * COLUMNS, most)
        store(work.factors, group * COLUMNS, factor)
        store(work.totals, group * COLUMNS, fma(total, factor, summed) if chunk > work.first else summed)
        hide(args, span, work, group, first_row, chunk, True)
        weights = work.weights + group % work.groups_per_head * CHUNK * tiles.LINE // 2
        for block in range(0, num_tokens, BLOCK):
            transpose_to_bfloat16(place + block * tiles.LINE, weights + block * tiles.LINE // 2)

    return weigh
