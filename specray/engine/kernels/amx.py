"""Rows times a panel of weights with AMX: 32 rows at a time, a block of both in registers that are matrices.

A register (``tiles``) holds of 16 rows one block of input features; of a panel (``product``), which lies as
the instruction wants it, one block of half its output features; of the sums, 16 rows of the same half. Up to
32 rows the panel streams through once, at the speed of memory. More rows are packed before, tile by tile: as
they are, a power of two of bytes apart, they push each other out of the caches.
"""

from __future__ import annotations

from typing import Any

from specray.engine.kernels import tiles
from specray.engine.kernels.product import AHEAD
from specray.engine.kernels.simd import kernel, prefetch, vectors

MAX_ROWS = 32
"""At once: two tiles of rows times two of output features are four of the eight registers."""
TILE_ROWS = tiles.ROWS
PACKED_STRIDE = tiles.LINE
_LINE = tiles.LINE
"""Also of a block of one row of bfloat16; of 16 sums."""
_PANEL_LINE = 2 * _LINE
"""Of two input features of a panel's 32; of a row of 32 sums."""
_BLOCK_BYTES = TILE_ROWS * _PANEL_LINE
"""Of a panel; of 16 rows of sums."""
_BLOCK_LINES = _BLOCK_BYTES // _LINE
_BLOCK = 32
"""Features; also of a panel's output."""
_BLOCKS_AT_ONCE = 8
"""Of a panel with many tiles of rows: 16 KiB, which stay in the first cache."""
_FEW_TILES = 2
"""Of 32 rows: so many go through a panel as a whole, as putting sums away and fetching them takes longer."""


def padded(num_rows: int) -> int:
    """Rows of as many full tiles. What lies in the last one behind the rows does not matter to them."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def packed_shape(num_rows: int, num_features: int) -> tuple[int, int, int, int]:
    """Of packed rows: tile by tile, in a tile block by block, in a block row by row."""
    return padded(num_rows) // TILE_ROWS, num_features // _BLOCK, TILE_ROWS, _BLOCK


def multiply_kernel() -> Any:
    """As that of ``product``. Rows with a stride of one line are packed by ``pack_kernel``.

    More than ``MAX_ROWS`` must be packed, and be full tiles.
    """
    # Sums by tile of rows and half of the panel, rows by tile, weights by half.
    configure = tiles.configure((0, 1, 4), (2, 3, 5), (6, 7))
    release, one, two = tiles.release, _make_tile(1), _make_tile(2)

    @kernel()
    def multiply(
        rows: int, stride: int, weight: int, sums: int, num_rows: int, num_blocks: int, end: int
    ) -> None:
        num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
        blocks_at_once = num_blocks if num_tiles <= _FEW_TILES else _BLOCKS_AT_ONCE
        # A tile of rows is as large packed as it is not.
        below, shift = num_blocks * tiles.BYTES, tiles.BYTES if stride == _LINE else _LINE
        second = min(TILE_ROWS, max(1, num_rows - TILE_ROWS))
        configure((min(TILE_ROWS, num_rows), _LINE, second, _LINE, TILE_ROWS, _LINE))
        for block in range(0, num_blocks, blocks_at_once):
            count = min(blocks_at_once, num_blocks - block)
            piece = weight + block * _BLOCK_BYTES
            next_piece = piece + count * _BLOCK_BYTES
            for index in range(num_tiles):
                ahead, num_lines = piece + AHEAD, _BLOCK_LINES
                if num_tiles > 1:
                    # Each tile asks for a part, so that memory always works.
                    ahead = next_piece + count * _BLOCK_BYTES * index // num_tiles
                    num_lines = (_BLOCK_LINES + num_tiles - 1) // num_tiles
                if ahead >= end:
                    num_lines = 0
                first = index * MAX_ROWS
                place, total = rows + 2 * index * below + block * shift, sums + first * _PANEL_LINE
                if num_rows - first > TILE_ROWS:
                    two(block == 0, place, below, stride, shift, piece, total, count, ahead, num_lines)
                else:
                    one(block == 0, place, below, stride, shift, piece, total, count, ahead, num_lines)
        release()

    return multiply


def _make_tile(num_tiles: int) -> Any:
    """One tile of rows, or two, times some blocks of a panel; added to the sums unless these are the first.

    ``below``, ``stride`` and ``shift`` are bytes to the second tile of rows, to the next row and to the next
    block. With every block, ``num_lines`` lines are asked for, from ``ahead`` on.
    """
    is_pair = num_tiles == 2
    clear_0, clear_1, clear_2, clear_3 = (tiles.zero(register) for register in range(4))
    fetch_0, fetch_1, fetch_2, fetch_3, rows_0, rows_1, weights_0, weights_1 = (
        tiles.load(register) for register in range(8)
    )
    keep_0, keep_1, keep_2, keep_3 = (tiles.store(register) for register in range(4))
    product_0, product_1, product_2, product_3 = (
        tiles.multiply(sums, 4 + sums // 2, 6 + sums % 2) for sums in range(4)
    )

    @kernel()
    def tile(
        is_first: bool,
        rows: int,
        below: int,
        stride: int,
        shift: int,
        weight: int,
        sums: int,
        num_blocks: int,
        ahead: int,
        num_lines: int,
    ) -> None:
        other = sums + _BLOCK_BYTES
        if is_first:
            clear_0()
            clear_1()
            if is_pair:
                clear_2()
                clear_3()
        else:
            fetch_0(sums, _PANEL_LINE)
            fetch_1(sums + _LINE, _PANEL_LINE)
            if is_pair:
                fetch_2(other, _PANEL_LINE)
                fetch_3(other + _LINE, _PANEL_LINE)
        for block in range(num_blocks):
            for line in range(block * num_lines, (block + 1) * num_lines):
                prefetch(ahead + line * _LINE)
            place, piece = rows + block * shift, weight + block * _BLOCK_BYTES
            weights_0(piece, _PANEL_LINE)
            weights_1(piece + _LINE, _PANEL_LINE)
            rows_0(place, stride)
            product_0()
            product_1()
            if is_pair:
                rows_1(place + below, stride)
                product_2()
                product_3()
        keep_0(sums, _PANEL_LINE)
        keep_1(sums + _LINE, _PANEL_LINE)
        if is_pair:
            keep_2(other, _PANEL_LINE)
            keep_3(other + _LINE, _PANEL_LINE)

    return tile


def pack_kernel() -> Any:
    """``(rows, packed, num_rows, num_blocks, first, last)``: packs the tiles of rows ``first..last - 1``.

    Tile by tile, in a tile block by block, in a block row by row.
    """
    line = vectors(_LINE // 4, "float32")
    load, store = line.load, line.store

    @kernel()
    def pack(rows: int, packed: int, num_rows: int, num_blocks: int, first: int, last: int) -> None:
        for tile in range(first, last):
            for row in range(tile * TILE_ROWS, min(num_rows, (tile + 1) * TILE_ROWS)):
                source = rows + row * num_blocks * _LINE
                target = packed + tile * num_blocks * tiles.BYTES + row % TILE_ROWS * _LINE
                for block in range(num_blocks):
                    store(target + block * tiles.BYTES, 0, load(source + block * _LINE, 0))

    return pack
