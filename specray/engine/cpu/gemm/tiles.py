"""AMX instructions for kernels: tile registers of 16 rows of 64 bytes, and the product of two of them.

Intel: *Architecture Instruction Set Extensions*, chapter 3 (LDTILECFG, TILELOADD, TDPBF16PS). The product of
bfloat16 ``[m, 2k]`` and ``[k, n, 2]`` is added to float32 ``[m, n]``, pair by pair: an element of the result
depends on its own row and column alone.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

ROWS = 16
"""Maximum rows of a register."""
LINE = 64
"""Maximum bytes of a register's row."""
BYTES = ROWS * LINE

_SYSCALL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Numbers of x86-64 Linux: arch_prctl, its code ARCH_REQ_XCOMP_PERM, and the tile state."""
_INT8, _INT64 = ir.IntType(8), ir.IntType(64)
_CONFIG_WORDS = 8


@functools.cache
def is_usable() -> bool:
    """Whether the processor has bfloat16 AMX and the system permits it; asks the system for this process."""
    features = llvmlite.binding.get_host_cpu_features()
    if not (features.get("amx-bf16", False) and features.get("amx-tile", False)):
        return False
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(_SYSCALL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _command(name: str, *registers: int) -> Any:
    """Makes an intrinsic without arguments."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, name, *(ir.Constant(_INT8, register) for register in registers))
        return context.get_dummy_value()

    def command(context: Any) -> Any:
        return types.void(), code

    return intrinsic(command)


def _transfer(name: str, register: int) -> Any:
    """Makes an intrinsic of an address and the bytes between rows."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, stride = args
        place = builder.inttoptr(address, _INT8.as_pointer())
        _call(builder, name, ir.Constant(_INT8, register), place, stride)
        return context.get_dummy_value()

    def transfer(context: Any, address: Any, stride: Any) -> Any:
        return types.void(types.int64, types.int64), code

    return intrinsic(transfer)


def load(register: int) -> Callable[[int, int], None]:
    """``(address, bytes between rows)``."""
    function: Callable[[int, int], None] = _transfer("tileloadd64", register)
    return function


def stream(register: int) -> Callable[[int, int], None]:
    """``load`` with a non-temporal hint, for data that is not read again soon."""
    function: Callable[[int, int], None] = _transfer("tileloaddt164", register)
    return function


def store(register: int) -> Callable[[int, int], None]:
    function: Callable[[int, int], None] = _transfer("tilestored64", register)
    return function


def zero(register: int) -> Callable[[], None]:
    function: Callable[[], None] = _command("tilezero", register)
    return function


def multiply(sums: int, rows: int, columns: int) -> Callable[[], None]:
    """``sums += rows @ columns``."""
    function: Callable[[], None] = _command("tdpbf16ps", sums, rows, columns)
    return function


release: Callable[[], None] = _command("tilerelease")
"""Releases the registers, so that context switches need not save them."""


def configure(*groups: tuple[int, ...]) -> Any:
    """Makes ``((rows, bytes of a row, ...))``, two numbers per group of registers, which sets their shapes.

    The processor refuses registers with 0 rows or bytes, even unused ones.
    """
    # 64 bytes: the palette; from 16 on, two bytes per register for bytes of a row; from 48 on, one for rows.
    units = [
        (
            sum(1 << 8 * register for register in group),
            sum(1 << 16 * register for register in group if register < 4),
            sum(1 << 16 * (register - 4) for register in group if register >= 4),
        )
        for group in groups
    ]

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = cgutils.unpack_tuple(builder, args[0])
        config = cgutils.alloca_once(builder, ir.ArrayType(_INT64, _CONFIG_WORDS))
        words = [ir.Constant(_INT64, 0)] * _CONFIG_WORDS
        words[0] = ir.Constant(_INT64, 1)
        for (rows, first, second), num_rows, line in zip(units, pairs[::2], pairs[1::2], strict=True):
            for index, unit, value in ((6, rows, num_rows), (2, first, line), (3, second, line)):
                words[index] = builder.add(words[index], builder.mul(value, ir.Constant(_INT64, unit)))
        zero = ir.Constant(ir.IntType(32), 0)
        for index, word in enumerate(words):
            builder.store(word, builder.gep(config, [zero, ir.Constant(ir.IntType(32), index)]))
        _call(builder, "ldtilecfg", builder.bitcast(config, _INT8.as_pointer()))
        return context.get_dummy_value()

    def set_shapes(context: Any, shapes: Any) -> Any:
        return types.void(types.containers.UniTuple(types.int64, 2 * len(groups))), code

    return intrinsic(set_shapes)
