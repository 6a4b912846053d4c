"""The weights of attention from scores, of rows that see some of the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from specray.engine.cpu.attention.scores import TILE
from specray.engine.cpu.simd import kernel, vectors

_HIDDEN = np.float32(-1e30)
_ONE = np.float32(1.0)


def softmax_kernel() -> Any:
    """``(weights, address, index, first, seen)``: a row of ``weights``, which begin at the address.

    The row is as long as a multiple of 16 and 16 more; those before ``first`` are not looked at.
    """
    wide = vectors(TILE, "float32")
    load, store, splat, add, sub, larger, exp, total, largest = (
        wide.load, wide.store, wide.splat, wide.add, wide.sub, wide.max, wide.exp, wide.sum, wide.largest
    )  # fmt: skip

    @kernel()
    def softmax(
        weights: Any, address: int, index: int, first: int, seen: tuple[int, int, int, int, int]
    ) -> None:
        """Of a row of scores: those seen, as ``attend.seen`` says.

        The others become (next to) 0. What is left to multiply with lies behind them.
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
        most = splat(largest(most))
        summed = sub(most, most)
        for position in range(begin, stride, TILE):
            weight = exp(sub(load(address, position), most))
            store(address, position, weight)
            summed = add(summed, weight)
        weights[index, stride] = _ONE / total(summed)

    return softmax
