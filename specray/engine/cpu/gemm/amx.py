"""AMX product of rows with a panel of weights: 32 rows at a time, one block of each in tile registers.

A tile register (``tiles``) holds one block of input features of 16 rows, or of half a panel's output
features, or the sums of 16 rows with that half. Each register's contents are contiguous in memory: always in
a panel, and in rows if they are packed (``rows``), as more than 32 must be. Flat rows a power of two of bytes
apart would evict each other from the caches.

Rows of the previous panel run through the epilogue between products, which makes a gate of many rows an
eighth faster. Up to about a hundred rows, memory bandwidth is the bound, and a core has at most sixteen lines
in flight. To keep a few in flight at all times, lines are prefetched between the products, not far ahead; the
processor's own prefetcher fetches what follows in the stream.
"""

from __future__ import annotations

from typing import Any

import torch

from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.rows import BLOCK, HEIGHT
from specray.engine.cpu.gemm.vector import CLOCK_BITS
from specray.engine.cpu.simd import kernel, prefetch

MAX_ROWS = HEIGHT
"""Maximum rows at once: two tiles of rows times two of output features fill four of the eight registers."""
_TILE_ROWS = tiles.ROWS
_LINE = tiles.LINE
"""Bytes of a cache line, of a row's bfloat16 block, and of 16 sums."""
_SUMS_LINE = 2 * _LINE
"""Bytes of a row of a panel's 32 sums."""
_PAIR_BYTES = 2 * tiles.BYTES
"""Bytes of a block of 32 packed rows, and of a block of a panel."""
_BLOCK_LINES = _PAIR_BYTES // _LINE
_SUMS_BYTES = _TILE_ROWS * _SUMS_LINE
_AHEAD = _PAIR_BYTES
"""Prefetch distance in bytes: the next block. At four blocks a core reads a seventh less per second."""
_BLOCKS_AT_ONCE, _BLOCKS_OF_TWO_PAIRS, _BLOCKS_OF_MANY_PAIRS = 8, 4, 16
"""Blocks of a panel that stay in L1 for all pairs of row tiles. Two pairs alternate between memory and
products, so few blocks are better; with many pairs, more blocks mean fewer loads and stores of sums."""
_MANY_PAIRS = 7
_FEW_PAIRS = 3
"""Maximum pairs of row tiles for which the first one prefetches everything. With more, each prefetches its
share, so that memory stays busy while products take longer than reading."""


def arrange(weight: torch.Tensor) -> torch.Tensor:
    """Rearranges ``[32 * panels, in_features]`` to ``[panels, in_features / 32, 2, 16, 16, 2]``.

    The order is: panel, block, half of the output features, pair of input features, output feature.
    """
    parts = weight.view(-1, 2, _TILE_ROWS, weight.shape[1] // BLOCK, _TILE_ROWS, 2)
    return parts.permute(0, 3, 1, 4, 2, 5)


@kernel()
def _blocks_at_once(num_pairs: int, num_blocks: int) -> int:
    if num_pairs == 1:
        return num_blocks
    if num_pairs == 2:
        return _BLOCKS_OF_TWO_PAIRS
    return _BLOCKS_OF_MANY_PAIRS if num_pairs >= _MANY_PAIRS else _BLOCKS_AT_ONCE


def multiply_kernel(finish: Any) -> tuple[Any, Any, Any]:
    """Makes the counterpart of ``vector.multiply_kernel``. More than ``MAX_ROWS`` rows must be packed."""
    # Registers: sums by tile of rows and half of the panel, rows by tile, weights by half.
    configure = tiles.configure((0, 1, 4), (2, 3, 5), (6, 7))
    release, one, two = tiles.release, _make_tile(1, _finish_none), _make_tile(2, _finish_none)
    one_finishing, two_finishing = _make_tile(1, finish), _make_tile(2, finish)

    @kernel()
    def begin(num_rows: int) -> None:
        first = second = _TILE_ROWS
        # Packed rows fill their tiles.
        if num_rows <= MAX_ROWS:
            first, second = min(_TILE_ROWS, num_rows), min(_TILE_ROWS, max(1, num_rows - _TILE_ROWS))
        configure((first, _LINE, second, _LINE, _TILE_ROWS, _LINE))

    @kernel()
    def multiply(
        rows: int,
        steps: tuple[int, int],
        weight: int,
        sums: int,
        num_rows: int,
        num_blocks: int,
        blocks: tuple[int, int],
        end: int,
        then: Any,
        due: tuple[int, int],
    ) -> int:
        stride, shift = steps
        num_pairs = (num_rows + MAX_ROWS - 1) // MAX_ROWS
        blocks_at_once, below = _blocks_at_once(num_pairs, num_blocks), _TILE_ROWS * stride
        clock, pace = due
        for block in range(blocks[0], blocks[1], blocks_at_once):
            count = min(blocks_at_once, blocks[1] - block)
            piece = weight + block * _PAIR_BYTES
            for index in range(num_pairs):
                ahead, num_lines = piece + _AHEAD, _BLOCK_LINES if index == 0 else 0
                if num_pairs > _FEW_PAIRS:
                    ahead = piece + count * _PAIR_BYTES * (num_pairs + index) // num_pairs
                    num_lines = (_BLOCK_LINES + num_pairs - 1) // num_pairs
                    if block + count == blocks[1]:
                        # The same blocks of the next panel, which follow directly when they are all blocks.
                        ahead += (num_blocks - blocks[1] + blocks[0]) * _PAIR_BYTES
                if ahead >= end:
                    num_lines = 0
                first = index * MAX_ROWS
                place = rows + index * num_blocks * _PAIR_BYTES + block * shift
                wanted, waiting = (ahead, num_lines), (clock, pace)
                total = sums + first * _SUMS_LINE
                places, is_pair = (place, below, stride, shift), num_rows - first > _TILE_ROWS
                if pace > 0 and is_pair:
                    two_finishing(block == 0, places, piece, total, count, wanted, then, waiting)
                elif pace > 0:
                    one_finishing(block == 0, places, piece, total, count, wanted, then, waiting)
                elif is_pair:
                    two(block == 0, places, piece, total, count, wanted, then, waiting)
                else:
                    one(block == 0, places, piece, total, count, wanted, then, waiting)
                clock += pace * count
        return clock

    @kernel()
    def end() -> None:
        release()

    return begin, multiply, end


@kernel(forceinline=True)
def _finish_none(then: Any, first: int, last: int) -> None:
    """Epilogue that does nothing, for steps of few rows: it makes their loop shorter."""


def _make_tile(num_tiles: int, finish: Any) -> Any:
    """Makes the product of one or two tiles of rows with some blocks of a panel.

    It is added to the sums unless these blocks are the first. ``places`` holds the rows' address, and bytes
    to the second tile of rows, to the next row and to the next block. Each block prefetches lines
    (``wanted``: address, number) and finishes rows of another panel that are due: the tile unit works in
    parallel.
    """
    is_pair = num_tiles == 2
    clear_0, clear_1, clear_2, clear_3 = (tiles.zero(register) for register in range(4))
    fetch_0, fetch_1, fetch_2, fetch_3 = (tiles.load(register) for register in range(4))
    rows_0, rows_1 = tiles.stream(4), tiles.stream(5)
    weights_0, weights_1 = tiles.load(6), tiles.load(7)
    keep_0, keep_1, keep_2, keep_3 = (tiles.store(register) for register in range(4))
    product_0, product_1, product_2, product_3 = (
        tiles.multiply(sums, 4 + sums // 2, 6 + sums % 2) for sums in range(4)
    )

    @kernel()
    def tile(
        is_first: bool,
        places: tuple[int, int, int, int],
        weight: int,
        sums: int,
        num_blocks: int,
        wanted: tuple[int, int],
        then: Any,
        waiting: tuple[int, int],
    ) -> None:
        rows, below, stride, shift = places
        ahead, num_lines = wanted
        clock, pace = waiting
        other = sums + _SUMS_BYTES
        if is_first:
            clear_0()
            clear_1()
            if is_pair:
                clear_2()
                clear_3()
        else:
            fetch_0(sums, _SUMS_LINE)
            fetch_1(sums + _LINE, _SUMS_LINE)
            if is_pair:
                fetch_2(other, _SUMS_LINE)
                fetch_3(other + _LINE, _SUMS_LINE)
        half = num_lines // 2
        for block in range(num_blocks):
            line = ahead + block * num_lines * _LINE
            for index in range(half):
                prefetch(line + index * _LINE)
            place, piece = rows + block * shift, weight + block * _PAIR_BYTES
            weights_0(piece, _LINE)
            rows_0(place, stride)
            product_0()
            weights_1(piece + tiles.BYTES, _LINE)
            product_1()
            for index in range(half, num_lines):
                prefetch(line + index * _LINE)
            if is_pair:
                rows_1(place + below, stride)
                product_2()
                product_3()
            finish(then, clock >> CLOCK_BITS, (clock + pace) >> CLOCK_BITS)
            clock += pace
        keep_0(sums, _SUMS_LINE)
        keep_1(sums + _LINE, _SUMS_LINE)
        if is_pair:
            keep_2(other, _SUMS_LINE)
            keep_3(other + _LINE, _SUMS_LINE)

    return tile
