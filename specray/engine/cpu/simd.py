"""Float32 vectors for kernels: loads, stores and arithmetic as numba intrinsics of a chosen width.

LLVM's auto-vectoriser is unreliable here: it unrolls short loops before it sees them and reduces sums one
element at a time. With these, a kernel states what is one vector, and LLVM splits it into the machine's
registers. Addresses are plain integers, from tensors that the kernel's caller keeps alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WHOLE = np.float32(3 << 22)
"""Rounding constant, 1.5 * 2**23: a sum with it is an integer whose low bits are the rounded addend."""
_REASSOCIATE = ("reassoc", "nnan", "nsz")

kernel = functools.partial(njit, nogil=True, error_model="numpy", no_cpython_wrapper=True)
"""Decorator for functions that kernels call."""


class Vector(types.Type):
    """numba type of a vector of ``lanes`` float32."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_FLOAT, vector.lanes))


def call_prefetch(builder: Any, address: Any) -> None:
    """Prefetches the cache line of an address, which need not be mapped, into L2.

    Not into L1: rows a power of two of bytes apart would evict each other.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_cache, data = (ir.Constant(_INT32, number) for number in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, second_cache, data])


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Prefetches a cache line into L2; ``call_prefetch`` for kernels."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), code


def intrinsic_of(count: int, kind: Any, emit: Callable[..., Any], result: Any) -> Any:
    """Makes an intrinsic of ``count`` values of one kind, whose code is ``emit(builder, *values)``.

    Args:
        emit: returns None when ``result`` is ``types.void``.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    # numba reads the number of arguments off the function, so there is one for each.
    def unary(context: Any, x: Any) -> Any:
        return result(kind), code

    def binary(context: Any, x: Any, y: Any) -> Any:
        return result(kind, kind), code

    def ternary(context: Any, x: Any, y: Any, z: Any) -> Any:
        return result(kind, kind, kind), code

    return intrinsic((unary, binary, ternary)[count - 1])


@dataclass(frozen=True, slots=True)
class Vectors:
    """Operations on vectors of one width; ``load`` and ``store`` also convert from and to the tensor's type.

    Addresses are in bytes, indexes in elements of the tensor.
    """

    load: Callable[..., Any]  # (address, index) -> vector
    store: Callable[..., Any]  # (address, index, vector)
    splat: Callable[..., Any]  # (float32) -> vector
    add: Callable[..., Any]
    sub: Callable[..., Any]
    mul: Callable[..., Any]
    div: Callable[..., Any]
    max: Callable[..., Any]
    fma: Callable[..., Any]  # (x, y, z) -> x * y + z
    exp: Callable[..., Any]  # of numbers <= 88; relative error below 2e-7
    sum: Callable[..., Any]  # (vector) -> float32
    largest: Callable[..., Any]  # (vector) -> float32


@functools.cache
def vectors(lanes: int, dtype: str = "float32") -> Vectors:
    """Makes operations on vectors of ``lanes`` elements, ``float32`` or ``bfloat16`` in memory."""
    vector = Vector(lanes)
    floats, halves, words = (ir.VectorType(kind, lanes) for kind in (_FLOAT, _INT16, _INT32))
    is_bfloat16 = dtype == "bfloat16"
    stored, item_size = (halves, 2) if is_bfloat16 else (floats, 4)

    def constant(number: int) -> ir.Constant:
        return ir.Constant(words, [number] * lanes)

    def pointer(builder: Any, address: Any, index: Any) -> Any:
        byte = builder.add(address, builder.mul(index, ir.Constant(_INT64, item_size)))
        return builder.inttoptr(byte, stored.as_pointer())

    @intrinsic
    def load(context: Any, address: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(pointer(builder, *args))
            value.align = item_size
            if is_bfloat16:
                value = builder.bitcast(builder.shl(builder.zext(value, words), constant(16)), floats)
            return value

        return vector(types.int64, types.int64), code

    @intrinsic
    def store(context: Any, address: Any, index: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, index, value = args
            if is_bfloat16:
                # Round to nearest, ties to even, as torch does.
                bits = builder.bitcast(value, words)
                is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
                bits = builder.add(bits, builder.add(constant(0x7FFF), is_odd))
                value = builder.trunc(builder.lshr(bits, constant(16)), halves)
            builder.store(value, pointer(builder, address, index)).align = item_size
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, vector), code

    @intrinsic
    def splat(context: Any, number: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            undefined = ir.Constant(floats, ir.Undefined)
            first = builder.insert_element(undefined, args[0], ir.Constant(_INT32, 0))
            return builder.shuffle_vector(first, undefined, constant(0))

        return vector(types.float32), code

    def multiplied(builder: Any, value: Any, shifted: Any) -> Any:
        # The low bits of the sum are the exponent; the shift drops all others.
        exponent = builder.shl(builder.bitcast(shifted, words), constant(23))
        return builder.bitcast(builder.add(builder.bitcast(value, words), exponent), floats)

    def operator(count: int, emit: Callable[..., Any], result: Any = vector) -> Any:
        return intrinsic_of(count, vector, emit, result)

    def named(name: str, count: int) -> Any:
        def emit(builder: Any, *args: Any) -> Any:
            kind = ir.FunctionType(floats, [floats] * count)
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{lanes}f32")
            return builder.call(function, args)

        return operator(count, emit)

    def reduction(name: str, *initial: ir.Constant) -> Any:
        def emit(builder: Any, value: Any) -> Any:
            kind = ir.FunctionType(_FLOAT, [*(_FLOAT for _ in initial), floats])
            symbol = f"llvm.vector.reduce.{name}.v{lanes}f32"
            function = cgutils.get_or_insert_function(builder.module, kind, symbol)
            return builder.call(function, [*initial, value], fastmath=_REASSOCIATE)

        return operator(1, emit, types.float32)

    add = operator(2, lambda builder, x, y: builder.fadd(x, y))
    sub = operator(2, lambda builder, x, y: builder.fsub(x, y))
    mul = operator(2, lambda builder, x, y: builder.fmul(x, y))
    div = operator(2, lambda builder, x, y: builder.fdiv(x, y))
    # One instruction; llvm.maxnum takes three, to handle NaN.
    larger = operator(2, lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))
    fma = named("fma", 3)
    exp = _make_exp(splat, add, sub, mul, larger, fma, operator(2, multiplied))
    total = reduction("fadd", ir.Constant(_FLOAT, -0.0))
    return Vectors(load, store, splat, add, sub, mul, div, larger, fma, exp, total, reduction("fmax"))


def _make_exp(splat: Any, add: Any, sub: Any, mul: Any, larger: Any, fma: Any, times_power: Any) -> Any:
    """Makes the exponential of Cephes (Moshier): 2^n times a polynomial of the rest, below ln(2) / 2.

    Args:
        times_power: ``(x, y)``: returns ``x * 2**n``, where ``y`` is ``_WHOLE + n``.
    """
    lowest, per_ln2, one = (np.float32(x) for x in (-87.0, 1.44269504, 1.0))
    ln2_high, ln2_low = np.float32(-0.693359375), np.float32(2.12194440e-4)
    c5, c4, c3, c2, c1 = (
        np.float32(x)
        for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)
    )
    c0 = np.float32(5.0000001201e-1)

    @kernel()
    def exp(x: Any) -> Any:
        x = larger(x, splat(lowest))
        shifted = fma(x, splat(per_ln2), splat(_WHOLE))
        n = sub(shifted, splat(_WHOLE))
        rest = fma(n, splat(ln2_low), fma(n, splat(ln2_high), x))
        value = fma(splat(c5), rest, splat(c4))
        value = fma(value, rest, splat(c3))
        value = fma(value, rest, splat(c2))
        value = fma(value, rest, splat(c1))
        value = fma(value, rest, splat(c0))
        value = add(fma(value, mul(rest, rest), rest), splat(one))
        return times_power(value, shifted)

    return exp
