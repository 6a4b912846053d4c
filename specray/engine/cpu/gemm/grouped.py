"""Linear layers of one shape, of which each multiplies rows of its own: experts, all that are hit in one job.

One after the other each would be a call from Python, longer than the product of one row, with a wait of all
threads behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.cpu.gemm import product
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear
from specray.engine.cpu.gemm.rows import FlatRows


class TiledGroup:
    """Implements ``layers.experts.LayerGroup``; its numbers are those of the layers one by one.

    Args:
        layers: at least one, all of one kind and shape.
    """

    def __init__(self, layers: Sequence[TiledLinear | TiledGate]) -> None:
        products = [layer.product for layer in layers]
        # Its arguments are set anew in each call, of the group as of the layer itself.
        self._any = products[0]
        self._in_features = layers[0].in_features
        self._weights = np.array([each.weight.data_ptr() for each in products])
        self._biases = np.array([each.bias.data_ptr() for each in products])

    def takes(self, counts: NDArray[np.int64]) -> bool:
        """Whether ``num_rows`` of layers can be multiplied at once."""
        most = self._any.max_flat_rows
        return most is None or int(counts.max()) <= most

    def __call__(
        self, rows: torch.Tensor, layers: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Multiplies the first ``counts[0]`` rows by layer ``layers[0]``, the next by the next, ...

        Not thread-safe.

        Args:
            rows: ``[counts.sum(), in_features]``, one after the other.
            layers: those that have rows.
            counts: rows of each of them, at least one.

        Returns:
            ``[counts.sum(), out_features]``.
        """
        assert rows.is_contiguous(), "rows must follow each other"
        any_layer, most = self._any, int(counts.max())
        out = torch.empty(len(rows), any_layer.size, dtype=any_layer.weight.dtype)
        scratch = any_layer.prepare(FlatRows(rows[:most]), FlatRows(out[:most]), None)
        firsts = np.cumsum(counts) - counts
        args = np.repeat(any_layer.args[None], len(layers), axis=0)
        args[:, product.WEIGHT], args[:, product.BIAS] = self._weights[layers], self._biases[layers]
        args[:, product.ROWS] += firsts * (self._in_features * rows.itemsize)
        args[:, product.OUT] += firsts * (any_layer.size * out.itemsize)
        args[:, product.NUM_ROWS] = counts
        any_layer.thread_pool.run_beside(any_layer.kernel, args, any_layer.num_parts)
        del scratch
        return out


def group(layers: Sequence[object]) -> TiledGroup | None:
    tiled = [
        layer for layer in layers if isinstance(layer, TiledLinear | TiledGate) and layer.has_whole_blocks
    ]
    return TiledGroup(tiled) if len(tiled) == len(layers) and tiled else None
