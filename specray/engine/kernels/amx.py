"""Rows times a piece of a panel with AMX: 32 rows at a time, a block of both in registers that are matrices.

Intel: *Architecture Instruction Set Extensions*, chapter 3 (LDTILECFG, TILELOADD, TDPBF16PS). A tile register
holds 16 rows of 64 bytes: of the rows' bfloat16, one block of input features; of the panel, which lies as the
instruction wants it, one block of half its output features; of the sums, 16 rows of the same half.
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

from specray.engine.kernels.simd import call_prefetch

MAX_ROWS = 32
"""At once: two tiles of rows times two of output features are four of the eight registers."""
_TILE_ROWS = 16
_LINE = 64
"""Bytes of a tile's row; of a block of one row of bfloat16; of 16 sums."""
_PANEL_LINE = 2 * _LINE
"""Of two input features of a panel's 32; of a row of 32 sums."""
_BLOCK_BYTES = _TILE_ROWS * _PANEL_LINE
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


def make_tile() -> Any:
    """``(num_rows, rows, stride, weight, sums, num_blocks, ahead, step)``, as that of ``product``.

    At most ``MAX_ROWS`` rows. The registers' shape is set by each call; ``release`` is for the last.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *others = args
        full = ir.Constant(_INT64, _TILE_ROWS)
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
        stride: Any,
        weight: Any,
        sums: Any,
        num_blocks: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), code

    return intrinsic(tile)


@intrinsic
def release(context: Any) -> Any:
    """For kernels: the registers are empty again, and nobody has to keep them over a change of threads."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


def _configure(builder: Any, first: Any, second: Any) -> None:
    """Sets the registers' shape.

    Args:
        first, second: rows of both tiles of rows, 1 to 16.
    """
    config = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 8))
    shape = ir.Constant(_INT64, sum(_TILE_ROWS << 8 * register for register in _WEIGHTS))
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
    stride: Any,
    weight: Any,
    sums: Any,
    num_blocks: Any,
    ahead: Any,
    step: Any,
) -> None:
    line, tile_bytes = ir.Constant(_INT64, _PANEL_LINE), _TILE_ROWS * _PANEL_LINE
    places = [(tile, half) for tile in range(num_tiles) for half in range(2)]
    for tile, half in places:
        _load(builder, _SUMS[tile][half], sums, tile * tile_bytes + half * _LINE, line)
    below = builder.add(rows, builder.mul(stride, ir.Constant(_INT64, _TILE_ROWS)))
    with cgutils.for_range(builder, num_blocks, intp=_INT64) as loop:
        piece = builder.add(weight, builder.mul(loop.index, ir.Constant(_INT64, _BLOCK_BYTES)))
        shift = builder.mul(loop.index, ir.Constant(_INT64, _LINE))
        wanted = builder.mul(loop.index, builder.mul(step, ir.Constant(_INT64, _TILE_ROWS)))
        wanted = builder.add(ahead, wanted)
        for _ in range(_TILE_ROWS):
            for half in range(2):
                call_prefetch(builder, builder.add(wanted, ir.Constant(_INT64, half * _LINE)))
            wanted = builder.add(wanted, step)
        for half in range(2):
            _load(builder, _WEIGHTS[half], piece, half * _LINE, line)
        for tile, start in enumerate((rows, below)[:num_tiles]):
            _load(builder, _ROWS[tile], builder.add(start, shift), 0, stride)
            for half in range(2):
                registers = (_SUMS[tile][half], _ROWS[tile], _WEIGHTS[half])
                _call(builder, "tdpbf16ps", *(ir.Constant(_INT8, register) for register in registers))
    for tile, half in places:
        place = builder.add(sums, ir.Constant(_INT64, tile * tile_bytes + half * _LINE))
        number = ir.Constant(_INT8, _SUMS[tile][half])
        _call(builder, "tilestored64", number, builder.inttoptr(place, _BYTES), line)


def _load(builder: Any, register: int, address: Any, offset: int, stride: Any) -> None:
    place = builder.inttoptr(builder.add(address, ir.Constant(_INT64, offset)), _BYTES)
    _call(builder, "tileloadd64", ir.Constant(_INT8, register), place, stride)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)
