"""Softmax of attention scores for rows that see a range of tokens, and perhaps ancestors in a tree after it.

An ancestor's score stands at the place that the token has on a chain while weights are summed, so a row of a
tree has the bits of the same row without the tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specray.engine.cpu.attention.scores import TILE
from specray.engine.cpu.simd import kernel, vectors

_HIDDEN, _ZERO = np.float32(-1e30), np.float32(0.0)
_ONE = np.float32(1.0)


def softmax_kernel() -> Any:
    """Makes ``(weights, address, index, first, seen, sink)``: row ``index`` of scores becomes weights.

    ``address`` is the row's. Its length is a multiple of 16, plus 16; columns before ``first`` are not read.
    """
    wide = vectors(TILE, "float32")
    load, store, splat, add, sub, larger, exp, total, largest = (
        wide.load, wide.store, wide.splat, wide.add, wide.sub, wide.max, wide.exp, wide.sum, wide.largest
    )  # fmt: skip

    @kernel()
    def gather(weights: Any, index: int, seen: tuple[int, int, int, int, int, int]) -> int:
        """Moves the ancestors' scores to their positions; returns the position after the last."""
        _, _, token, _, ancestors, place = seen
        while ancestors:
            if ancestors & 1:
                weights[index, place] = weights[index, token]
                place += 1
            # Without the sign: a mask of 64 bits has it.
            ancestors = (ancestors >> 1) & 0x7FFFFFFFFFFFFFFF
            token += 1
        return place

    @kernel()
    def scatter(weights: Any, index: int, seen: tuple[int, int, int, int, int, int], place: int) -> None:
        """Moves their weights back, from the last on; between them nothing weighs."""
        _, highest, first, last, ancestors, _ = seen
        for token in range(last - 1, first - 1, -1):
            weight = _ZERO
            if (ancestors >> (token - first)) & 1:
                place -= 1
                weight = weights[index, place]
            weights[index, token] = weight
        for token in range(highest, first):
            weights[index, token] = _ZERO

    @kernel()
    def softmax(
        weights: Any,
        address: int,
        index: int,
        first: int,
        seen: tuple[int, int, int, int, int, int],
        sink: float,
    ) -> None:
        """Turns the scores of what a row sees (``attend.seen``) into unnormalised weights.

        Hidden tokens get about 0. The normalising factor is written after the row; the sink, a further score
        without a value, is a part of it.
        """
        begin = first // TILE * TILE
        stride = weights.shape[1] - TILE
        end = gather(weights, index, seen)
        for position in range(begin, seen[0]):
            weights[index, position] = _HIDDEN
        for position in range(seen[1], seen[5]):
            weights[index, position] = _HIDDEN
        for position in range(end, stride):
            weights[index, position] = _HIDDEN
        most = load(address, begin)
        for position in range(begin + TILE, stride, TILE):
            most = larger(most, load(address, position))
        sinks = splat(sink)
        most = larger(splat(largest(most)), sinks)
        summed = sub(most, most)
        for position in range(begin, stride, TILE):
            weight = exp(sub(load(address, position), most))
            store(address, position, weight)
            summed = add(summed, weight)
        weights[index, stride] = _ONE / (total(summed) + largest(exp(sub(sinks, most))))
        if seen[4]:
            scatter(weights, index, seen, end)

    return softmax
