"""Softmax of attention scores for rows that see two ranges of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from specray.engine.cpu.attention.scores import TILE
from specray.engine.cpu.simd import kernel, vectors

_HIDDEN = np.float32(-1e30)
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
    def softmax(
        weights: Any, address: int, index: int, first: int, seen: tuple[int, int, int, int, int], sink: float
    ) -> None:
        """Turns the scores of what a row sees (``attend.seen``) into unnormalised weights.

        Hidden tokens get about 0. The normalising factor is written after the row; the sink, a further score
        without a value, is a part of it.
        """
        begin = first // TILE * TILE
        stride = weights.shape[1] - TILE
        for position in range(begin, seen[0]):
            weights[index, position] = _HIDDEN
        for position in range(seen[1], seen[2]):
            weights[index, position] = _HIDDEN
        holes, position = seen[4], seen[2]
        while holes:
            if holes & 1:
                weights[index, position] = _HIDDEN
            holes >>= 1
            position += 1
        for position in range(seen[3], stride):
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

    return softmax
