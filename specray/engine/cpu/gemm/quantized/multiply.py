"""Products of integer rows and a panel of quantised weights, a piece of the panel in L1 at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from specray.engine.cpu.gemm.quantized.integer_rows import BLOCK_BYTES, FACTOR_BYTES
from specray.engine.cpu.gemm.quantized.layout import Layout
from specray.engine.cpu.gemm.quantized.tile import Registers, make_tile
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel, vectors

_GROUPS_AT_ONCE = 8
"""Groups of a panel at once, in L1, where they are read several times."""


_AHEAD = 8192
"""Prefetch distance in bytes."""


def make_multiply(layout: Layout, registers: Registers) -> Any:
    """Makes ``(integers, factors, all_rows, panels, panel, sums, num_rows, num_groups)``: sums of rows and a
    panel.

    Addresses are of the first of these rows and of the first panel; ``all_rows`` is the number of rows of a
    group.
    """
    tile, block_bytes, groups_each = make_tile(layout, registers), layout.block_bytes, layout.num_groups
    blocks_at_once, max_rows = max(1, _GROUPS_AT_ONCE // groups_each), registers.max_rows
    line = vectors(PANEL, "float32")
    store, splat, zero = line.store, line.splat, np.float32(0.0)

    @kernel()
    def multiply(
        integers: int,
        factors: int,
        all_rows: int,
        panels: int,
        panel: int,
        sums: int,
        num_rows: int,
        num_groups: int,
    ) -> None:
        for row in range(num_rows):
            store(sums, row * PANEL, splat(zero))
        num_tiles, num_blocks = (num_rows + max_rows - 1) // max_rows, num_groups // groups_each
        weight = panels + panel * num_blocks * block_bytes
        at_once = num_blocks if num_tiles == 1 else blocks_at_once
        for block in range(0, num_blocks, at_once):
            count = min(at_once, num_blocks - block)
            piece = weight + block * block_bytes
            for index in range(num_tiles):
                first, last = num_rows * index // num_tiles, num_rows * (index + 1) // num_tiles
                # Prefetching cached data is almost free.
                ahead, step = (piece + _AHEAD, block_bytes) if index == 0 else (sums, 0)
                place = block * groups_each * all_rows + first
                tile(
                    last - first,
                    integers + place * BLOCK_BYTES,
                    factors + place * FACTOR_BYTES,
                    all_rows,
                    piece,
                    sums + first * PANEL * 4,
                    count,
                    ahead,
                    step,
                )

    return multiply
