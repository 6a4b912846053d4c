"""Rows times a panel of weights with AMX: 32 rows at a time, a block of both in registers that are matrices.

Intel: *Architecture Instruction Set Extensions*, chapter 3 (LDTILECFG, TILELOADD, TDPBF16PS). A tile register
holds 16 rows of 64 bytes: of the rows' bfloat16, one block of input features; of the panel (``product``),
which lies as this instruction wants it too, one block of half its output features; of the sums, 16 rows of
the same half. Up to 32 rows the panel streams through once, at the speed of memory. More rows are packed
before, tile by tile: as they are, a power of two of bytes apart, they push each other out of the caches.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.kernels.product import AHEAD
from specray.engine.kernels.simd import call_prefetch, kernel, vectors

MAX_ROWS = 32
"""At once: two tiles of rows times two of output features are four of the eight registers."""
TILE_ROWS = 16
_LINE = 64
"""Bytes of a tile's row; of a block of one row of bfloat16; of 16 sums."""
PACKED_STRIDE = _LINE
_PANEL_LINE = 2 * _LINE
"""Of two input features of a panel's 32; of a row of 32 sums."""
_TILE_BYTES = TILE_ROWS * _LINE
_BLOCK_BYTES = TILE_ROWS * _PANEL_LINE
"""Of a panel; of 16 rows of sums."""
_BLOCKS_AT_ONCE = 8
"""Of a panel with many tiles of rows: 16 KiB, which stay in the first cache."""
_FEW_TILES = 4
"""Of 32 rows: so many go through a panel as a whole, as putting sums away and fetching them takes longer."""
_SUMS = ((0, 1), (2, 3))
"""Registers: by tile of rows, by half of the panel."""
_ROWS, _WEIGHTS = (4, 5), (6, 7)
_SYSCALL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""x86-64 Linux: arch_prctl, its code ARCH_REQ_XCOMP_PERM, and which state is asked for."""

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = _INT8.as_pointer()


@functools.cache
def is_usable() -> bool:
    """Whether the processor multiplies tiles of bfloat16, and the system lets all threads of this process."""
    features = llvmlite.binding.get_host_cpu_features()
    if not (features.get("amx-bf16", False) and features.get("amx-tile", False)):
        return False
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(_SYSCALL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def multiply_kernel() -> Any:
    """As that of ``product``; rows with a stride of one line are those that ``pack_kernel`` has packed."""
    tile = _make_tile()

    @kernel()
    def multiply(
        rows: int, stride: int, weight: int, sums: int, num_rows: int, num_blocks: int, end: int
    ) -> None:
        num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
        blocks_at_once = num_blocks if num_tiles <= _FEW_TILES else _BLOCKS_AT_ONCE
        # A tile of rows is as large packed as it is not.
        below, shift = num_blocks * _TILE_BYTES, _TILE_BYTES if stride == _LINE else _LINE
        for block in range(0, num_blocks, blocks_at_once):
            count = min(blocks_at_once, num_blocks - block)
            piece = weight + block * _BLOCK_BYTES
            next_piece = piece + count * _BLOCK_BYTES
            for index in range(num_tiles):
                # Asking for what is at hand costs next to nothing.
                ahead, step = sums, 0
                if num_tiles == 1:
                    ahead, step = piece + AHEAD, _PANEL_LINE
                elif next_piece < end:
                    # Each tile asks for a part, so that memory always works.
                    ahead = next_piece + count * _BLOCK_BYTES * index // num_tiles
                    step = (_PANEL_LINE + num_tiles - 1) // num_tiles
                first = index * MAX_ROWS
                number, total = min(MAX_ROWS, num_rows - first), sums + first * _PANEL_LINE
                place = rows + 2 * index * below + block * shift
                tile(number, place, below, stride, shift, piece, total, count, ahead, step)
        _release()

    return multiply


def packed_size(num_rows: int, in_features: int) -> int:
    """Numbers of packed rows."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS * in_features


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
                target = packed + tile * num_blocks * _TILE_BYTES + row % TILE_ROWS * _LINE
                for block in range(num_blocks):
                    store(target + block * _TILE_BYTES, 0, load(source + block * _LINE, 0))

    return pack


def _make_tile() -> Any:
    """``(num_rows, rows, below, stride, shift, weight, sums, num_blocks, ahead, step)``: adds a product.

    At most ``MAX_ROWS`` rows. ``below``, ``stride`` and ``shift`` are bytes to the second tile of rows, to
    the next row and to the next block; the others are those of ``product``. The registers' shape is set by
    each call; ``_release`` is for the last.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *others = args
        full = ir.Constant(_INT64, TILE_ROWS)
        is_small = builder.icmp_signed("<=", num_rows, full)
        first = builder.select(is_small, num_rows, full)
        # A register without rows is refused, also one that is not used.
        second = builder.select(is_small, ir.Constant(_INT64, 1), builder.sub(num_rows, full))
        _configure(builder, first, second)
        with builder.if_else(is_small) as (small, large):
            with small:
                _emit_product(builder, 1, *others)
            with large:
                _emit_product(builder, 2, *others)
        return context.get_dummy_value()

    def tile(
        context: Any,
        num_rows: Any,
        rows: Any,
        below: Any,
        stride: Any,
        shift: Any,
        weight: Any,
        sums: Any,
        num_blocks: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 10), code

    return intrinsic(tile)


@intrinsic
def _release(context: Any) -> Any:
    """For kernels: the registers are empty again, and nobody has to keep them over a change of threads."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


def _configure(builder: Any, first: Any, second: Any) -> None:
    """Sets the registers' shape by 64 bytes: first the palette, from 16 on the lines, from 48 on the rows.

    Args:
        first, second: rows of both tiles of rows, 1 to 16.
    """
    config = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 8))
    shape = ir.Constant(_INT64, sum(TILE_ROWS << 8 * register for register in _WEIGHTS))
    for tile, count in enumerate((first, second)):
        places = sum(1 << 8 * register for register in (*_SUMS[tile], _ROWS[tile]))
        shape = builder.add(shape, builder.mul(count, ir.Constant(_INT64, places)))
    line = ir.Constant(_INT64, sum(_LINE << 16 * register for register in range(4)))
    zero, palette = ir.Constant(_INT64, 0), ir.Constant(_INT64, 1)
    words = (palette, zero, line, line, zero, zero, shape, zero)
    for index, word in enumerate(words):
        place = builder.gep(config, [ir.Constant(_INT32, 0), ir.Constant(_INT32, index)])
        builder.store(word, place)
    _call(builder, "ldtilecfg", builder.bitcast(config, _BYTES))


def _emit_product(
    builder: Any,
    num_tiles: int,
    rows: Any,
    below: Any,
    stride: Any,
    shift: Any,
    weight: Any,
    sums: Any,
    num_blocks: Any,
    ahead: Any,
    step: Any,
) -> None:
    line = ir.Constant(_INT64, _PANEL_LINE)
    places = [(tile, half) for tile in range(num_tiles) for half in range(2)]
    for tile, half in places:
        _load(builder, _SUMS[tile][half], sums, tile * _BLOCK_BYTES + half * _LINE, line)
    with cgutils.for_range(builder, num_blocks, intp=_INT64) as loop:
        piece = builder.add(weight, builder.mul(loop.index, ir.Constant(_INT64, _BLOCK_BYTES)))
        start = builder.add(rows, builder.mul(loop.index, shift))
        wanted = builder.mul(loop.index, builder.mul(step, ir.Constant(_INT64, TILE_ROWS)))
        wanted = builder.add(ahead, wanted)
        for _ in range(TILE_ROWS):
            # One line of two: the processor fetches the other by itself, and too many wishes at a time
            # keep what is in the second cache waiting.
            call_prefetch(builder, wanted)
            wanted = builder.add(wanted, step)
        for half in range(2):
            _load(builder, _WEIGHTS[half], piece, half * _LINE, line)
        for tile in range(num_tiles):
            _load(builder, _ROWS[tile], builder.add(start, below) if tile else start, 0, stride)
            for half in range(2):
                registers = (_SUMS[tile][half], _ROWS[tile], _WEIGHTS[half])
                _call(builder, "tdpbf16ps", *(ir.Constant(_INT8, register) for register in registers))
    for tile, half in places:
        place = builder.add(sums, ir.Constant(_INT64, tile * _BLOCK_BYTES + half * _LINE))
        number = ir.Constant(_INT8, _SUMS[tile][half])
        _call(builder, "tilestored64", number, builder.inttoptr(place, _BYTES), line)


def _load(builder: Any, register: int, address: Any, offset: int, stride: Any) -> None:
    place = builder.inttoptr(builder.add(address, ir.Constant(_INT64, offset)), _BYTES)
    _call(builder, "tileloadd64", ir.Constant(_INT8, register), place, stride)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)
