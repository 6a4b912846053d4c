"""AMX's registers in memory, so that kernels made for them run, slowly, where the processor has none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import carray, cfunc
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.cpu import compiled
from specray.engine.cpu.attention import kernel as attention_module
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.simd import kernel
from specray.engine.cpu.thread_pool import as_pointer

_NUM_REGISTERS = 8
_registers = np.zeros((_NUM_REGISTERS, tiles.ROWS, tiles.LINE), np.uint8)
_shapes = np.zeros((_NUM_REGISTERS, 2), np.int64)
"""Rows, and bytes of a row."""
_number = np.zeros(1, np.uint32)
"""A float32 by its bits."""
_REGISTERS, _SHAPES, _NUMBER = (each.ctypes.data for each in (_registers, _shapes, _number))
_LINE, _BYTES, _WORD = tiles.LINE, tiles.BYTES, ir.IntType(64)


@kernel()
def _bfloat16(bits: Any) -> Any:
    carray(as_pointer(_NUMBER), (1,), np.uint32)[0] = np.uint32(bits) << np.uint32(16)
    return carray(as_pointer(_NUMBER), (1,), np.float32)[0]


@cfunc(types.void(types.int64, types.int64, types.int64))
def _configure(register: int, rows: int, line: int) -> None:
    shapes = carray(as_pointer(_SHAPES), (_NUM_REGISTERS, 2), np.int64)
    shapes[register, 0], shapes[register, 1] = rows, line


@cfunc(types.void(types.int64, types.int64, types.int64))
def _load(register: int, address: int, stride: int) -> None:
    shapes = carray(as_pointer(_SHAPES), (_NUM_REGISTERS, 2), np.int64)
    for row in range(shapes[register, 0]):
        source = carray(as_pointer(address + row * stride), (_LINE,), np.uint8)
        target = carray(as_pointer(_REGISTERS + register * _BYTES + row * _LINE), (_LINE,), np.uint8)
        for byte in range(shapes[register, 1]):
            target[byte] = source[byte]


@cfunc(types.void(types.int64, types.int64, types.int64))
def _store(register: int, address: int, stride: int) -> None:
    shapes = carray(as_pointer(_SHAPES), (_NUM_REGISTERS, 2), np.int64)
    for row in range(shapes[register, 0]):
        target = carray(as_pointer(address + row * stride), (_LINE,), np.uint8)
        source = carray(as_pointer(_REGISTERS + register * _BYTES + row * _LINE), (_LINE,), np.uint8)
        for byte in range(shapes[register, 1]):
            target[byte] = source[byte]


@cfunc(types.void(types.int64))
def _zero(register: int) -> None:
    target = carray(as_pointer(_REGISTERS + register * _BYTES), (_BYTES,), np.uint8)
    for byte in range(_BYTES):
        target[byte] = 0


@cfunc(types.void(types.int64, types.int64, types.int64))
def _multiply(sums: int, rows: int, columns: int) -> None:
    shapes = carray(as_pointer(_SHAPES), (_NUM_REGISTERS, 2), np.int64)
    total = carray(as_pointer(_REGISTERS + sums * _BYTES), (16, 16), np.float32)
    left = carray(as_pointer(_REGISTERS + rows * _BYTES), (16, 32), np.uint16)
    right = carray(as_pointer(_REGISTERS + columns * _BYTES), (16, 16, 2), np.uint16)
    for row in range(shapes[sums, 0]):
        for column in range(shapes[sums, 1] // 4):
            number = total[row, column]
            for pair in range(shapes[rows, 1] // 4):
                for half in range(2):
                    number += _bfloat16(left[row, 2 * pair + half]) * _bfloat16(right[pair, column, half])
            total[row, column] = number


def _call(builder: Any, function: Any, args: list[Any]) -> None:
    """By address: an instruction is short, and so must its stand-in be for the compiler."""
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(args))
    builder.call(builder.inttoptr(ir.Constant(_WORD, function.address), kind.as_pointer()), args)


def _instruction(function: Any, num_args: int, *registers: int) -> Any:
    """An intrinsic that calls the function with the registers and its arguments."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, function, [*(ir.Constant(_WORD, register) for register in registers), *args])
        return context.get_dummy_value()

    def command(context: Any) -> Any:
        return types.void(), code

    def transfer(context: Any, address: Any, stride: Any) -> Any:
        return types.void(types.int64, types.int64), code

    return intrinsic(transfer if num_args else command)


def _configured(*groups: tuple[int, ...]) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sizes = cgutils.unpack_tuple(builder, args[0])
        for group, rows, line in zip(groups, sizes[::2], sizes[1::2], strict=True):
            for register in group:
                _call(builder, _configure, [ir.Constant(_WORD, register), rows, line])
        return context.get_dummy_value()

    def configure(context: Any, shapes: Any) -> Any:
        return types.void(types.containers.UniTuple(types.int64, 2 * len(groups))), code

    return intrinsic(configure)


@kernel()
def _release() -> None:
    return


_make_kernel = attention_module._attention_kernel.__wrapped__


@functools.cache
def _emulated_kernel(head_dim: int, dtype: str, has_amx: bool, latent_dim: int) -> Any:
    return _make_kernel(head_dim, dtype, has_amx, latent_dim)


@contextlib.contextmanager
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For one thread. Nothing that is compiled meanwhile is kept on disk."""
    makers: dict[str, Callable[..., Any]] = {
        "load": partial(_instruction, _load, 2),
        "stream": partial(_instruction, _load, 2),
        "store": partial(_instruction, _store, 2),
        "zero": partial(_instruction, _zero, 0),
        "multiply": partial(_instruction, _multiply, 0),
        "configure": _configured,
    }
    for name, make in makers.items():
        monkeypatch.setattr(tiles, name, make)
    monkeypatch.setattr(tiles, "release", _release)
    monkeypatch.setattr(tiles, "is_usable", lambda: True)
    monkeypatch.setattr(compiled, "_number_functions_apart", lambda: False)
    # A cache of this emulation's own, so that a kernel is compiled once for all tests.
    monkeypatch.setattr(attention_module, "_attention_kernel", _emulated_kernel)
    yield
