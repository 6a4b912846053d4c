"""Linear layers of bfloat16 weights with AVX-512's own bfloat16 products.

A panel is 64 output features; in a panel, two input features of all 64 lie side by side, four registers
wide, as the instruction wants them. A panel streams through once for up to six rows, whose 24 registers of
sums stay where they are; more rows reuse pieces of it from the second cache. Per core that is the speed of
memory at few rows and of the instruction at many. Sums are float32 in one order, so a row's result does not
depend on the other rows, nor on their number.

Blocking after Goto and van de Geijn: *Anatomy of high-performance matrix multiplication*, TOMS 2008.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.kernels.simd import kernel, vectors
from specray.engine.kernels.team import Kernel, Team, as_pointer, compile_kernel

PANEL = 64
"""Output features of a panel."""
BLOCK = 32
"""Input features are a multiple of it: sixteen pairs, one turn of the innermost loop."""
_MAX_ROWS_AT_ONCE = 6
_BLOCKS_AT_ONCE = 16
"""Of a panel with more rows than that: 64 KiB, which stay in the second cache."""
_REGISTERS = PANEL // 16
_BLOCK_BYTES = PANEL * BLOCK * 2
_PARTS_PER_THREAD = 8
"""Small enough that threads end together, large enough that taking one costs nothing."""
_MIN_SHARED_WEIGHTS = 262_144
"""Weights below which a second thread costs more than it brings."""

_PLAIN, _PLUS, _GATED = range(3)
(
    _ROWS,
    _OUT,
    _NUM_ROWS,
    _SUMMAND,
    _SCRATCH,
    _TEAM_SIZE,
    _WEIGHT,
    _BIAS,
    _NUM_BLOCKS,
    _SIZE,
    _KIND,
    _IS_FLOAT,
) = range(12)
_NUM_ARGS = 12


def can_tile(weight: torch.Tensor) -> bool:
    """Whether this machine has the instruction and nothing better, and the weight's shape and type fit."""
    features = llvmlite.binding.get_host_cpu_features()
    has_instruction = features.get("avx512bf16", False) and not features.get("amx-bf16", False)
    fits = weight.dtype == torch.bfloat16 and weight.shape[1] % BLOCK == 0
    return bool(has_instruction and weight.device.type == "cpu" and fits)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """``[out_features, in_features]`` to ``[panels, in_features / 32, 16, 64, 2]``, padded with zeros."""
    size, in_features = weight.shape
    padded = weight.new_zeros(-(-size // PANEL) * PANEL, in_features)
    padded[:size] = weight
    return padded.view(-1, PANEL, in_features // BLOCK, BLOCK // 2, 2).permute(0, 2, 3, 1, 4).contiguous()


def _padded(bias: torch.Tensor) -> torch.Tensor:
    """``[panels, 64]``, float32."""
    padded = torch.zeros(-(-len(bias) // PANEL), PANEL)
    padded.view(-1)[: len(bias)] = bias
    return padded


class _Tiled:
    """Weights in panels and the kernel's arguments that stay the same."""

    __slots__ = (
        "_args", "_args_address", "_kernel", "_num_parts", "_scratch_size", "_size", "_team", "bias", "weight"
    )  # fmt: skip

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, size: int, kind: int, team: Team
    ) -> None:
        self.weight, self.bias, self._size, self._team = weight, bias, size, team
        self._num_parts = min(-(-size // PANEL), _PARTS_PER_THREAD * team.size)
        if weight.numel() < _MIN_SHARED_WEIGHTS:
            self._num_parts = 1
        self._kernel = _linear_kernel()
        self._scratch_size = (2 if kind == _GATED else 1) * PANEL
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[[_WEIGHT, _NUM_BLOCKS, _SIZE, _KIND]] = weight.data_ptr(), weight.shape[1], size, kind
        self._args[_BIAS] = 0 if bias is None else bias.data_ptr()
        self._args_address = self._args.ctypes.data

    def run(
        self, rows: torch.Tensor, dtype: torch.dtype, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Not for two threads at once."""
        assert rows.is_contiguous(), "rows must follow each other"
        num_rows = rows.shape[0]
        out = torch.empty((num_rows, self._size), dtype=dtype)
        if num_rows == 0:
            return out
        scratch = torch.empty(self._team.size * num_rows * self._scratch_size)
        args = self._args
        args[_ROWS], args[_OUT], args[_SCRATCH] = rows.data_ptr(), out.data_ptr(), scratch.data_ptr()
        args[_NUM_ROWS], args[_IS_FLOAT] = num_rows, dtype == torch.float32
        if summand is not None:
            assert summand.is_contiguous(), "the summand's rows must follow each other"
            args[_SUMMAND] = summand.data_ptr()
        self._team.run(self._kernel, self._args_address, self._num_parts)
        return out


class TiledLinear:
    """``x -> x @ weight.T + bias`` for bfloat16 rows; implements ``linear.Linear``."""

    __slots__ = ("_plain", "_plus", "bias", "in_features", "num_weights", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, team: Team) -> None:
        size, self.in_features = weight.shape
        self.num_weights = weight.numel()
        self.weight = _panels(weight)
        self.bias = None if bias is None else _padded(bias)
        self._plain = _Tiled(self.weight, self.bias, size, _PLAIN, team)
        self._plus = _Tiled(self.weight, self.bias, size, _PLUS, team)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._plain.run(rows, torch.bfloat16)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in float32, not rounded."""
        return self._plain.run(rows, torch.float32)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._plus.run(rows, torch.bfloat16, summand)


class TiledGate:
    """``silu(gate(x)) * up(x)`` for bfloat16 rows; implements ``linear.Gate``."""

    __slots__ = ("_tiled", "bias", "in_features", "num_weights", "weight")

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        team: Team,
    ) -> None:
        self.in_features = gate.shape[1]
        self.num_weights = 2 * gate.numel()
        # A gate panel, then the up panel of the same features.
        self.weight = torch.stack((_panels(gate), _panels(up)), dim=1).flatten(0, 1)
        self.bias = None
        if gate_bias is not None and up_bias is not None:
            self.bias = torch.stack((_padded(gate_bias), _padded(up_bias)), dim=1)
        self._tiled = _Tiled(self.weight, self.bias, gate.shape[0], _GATED, team)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._tiled.run(rows, torch.bfloat16)


@functools.cache
def _linear_kernel() -> Kernel:
    multiply = _multiply_kernel()
    single, half = vectors(PANEL, "float32"), vectors(PANEL, "bfloat16")
    one, one_half = vectors(1, "float32"), vectors(1, "bfloat16")
    load, store, splat, add, sub, mul, div, larger, exp = (
        single.load, single.store, single.splat, single.add, single.sub, single.mul, single.div, single.max,
        single.exp,
    )  # fmt: skip
    load_half, store_half, load_one, store_one = half.load, half.store, one.load, one.store
    load_one_half, store_one_half, add_one = one_half.load, one_half.store, one.add
    zero, unit, lowest = np.float32(0.0), np.float32(1.0), np.float32(-87.0)

    @kernel()
    def finish(args: Any, sums: int, panel: int) -> None:
        """From the sums of a panel to the output."""
        size, out, num_rows = args[_SIZE], args[_OUT], args[_NUM_ROWS]
        kind, is_float = args[_KIND], args[_IS_FLOAT]
        count = min(PANEL, size - panel * PANEL)
        for row in range(num_rows):
            at = row * size + panel * PANEL
            if kind == _GATED:
                gate, up = load(sums, row * PANEL), load(sums, (num_rows + row) * PANEL)
                inverse = add(splat(unit), exp(sub(splat(zero), larger(gate, splat(lowest)))))
                store(sums, row * PANEL, mul(div(gate, inverse), up))
            if count == PANEL:
                value = load(sums, row * PANEL)
                if kind == _PLUS:
                    value = add(value, load_half(args[_SUMMAND], at))
                if is_float:
                    store(out, at, value)
                else:
                    store_half(out, at, value)
            else:
                for place in range(count):
                    number = load_one(sums, row * PANEL + place)
                    if kind == _PLUS:
                        number = add_one(number, load_one_half(args[_SUMMAND], at + place))
                    if is_float:
                        store_one(out, at + place, number)
                    else:
                        store_one_half(out, at + place, number)

    @compile_kernel
    def linear(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_blocks = args[_NUM_ROWS], args[_NUM_BLOCKS]
        num_layers = 2 if args[_KIND] == _GATED else 1
        sums = args[_SCRATCH] + thread * num_layers * num_rows * PANEL * 4
        num_panels = (args[_SIZE] + PANEL - 1) // PANEL
        for panel in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            for layer in range(num_layers):
                for row in range(num_rows):
                    first = splat(zero)
                    if args[_BIAS]:
                        first = load(args[_BIAS], (panel * num_layers + layer) * PANEL)
                    store(sums, (layer * num_rows + row) * PANEL, first)
                weight = args[_WEIGHT] + (panel * num_layers + layer) * num_blocks * _BLOCK_BYTES
                multiply(args[_ROWS], weight, sums + layer * num_rows * PANEL * 4, num_rows, num_blocks)
            finish(args, sums, panel)

    return linear


def _multiply_kernel() -> Any:
    one, two, three, four, five, six = (_tile(rows) for rows in range(1, _MAX_ROWS_AT_ONCE + 1))

    @kernel()
    def tile(num_rows: int, rows: int, stride: int, weight: int, sums: int, num_blocks: int) -> None:
        if num_rows == 1:
            one(rows, stride, weight, sums, num_blocks)
        elif num_rows == 2:
            two(rows, stride, weight, sums, num_blocks)
        elif num_rows == 3:
            three(rows, stride, weight, sums, num_blocks)
        elif num_rows == 4:
            four(rows, stride, weight, sums, num_blocks)
        elif num_rows == 5:
            five(rows, stride, weight, sums, num_blocks)
        else:
            six(rows, stride, weight, sums, num_blocks)

    @kernel()
    def multiply(rows: int, weight: int, sums: int, num_rows: int, num_blocks: int) -> None:
        """Adds ``rows @ panel`` to ``sums`` ``[num_rows, 64]``."""
        stride = num_blocks * BLOCK * 2
        if num_rows <= _MAX_ROWS_AT_ONCE:
            tile(num_rows, rows, stride, weight, sums, num_blocks)
            return
        num_tiles = (num_rows + _MAX_ROWS_AT_ONCE - 1) // _MAX_ROWS_AT_ONCE
        for block in range(0, num_blocks, _BLOCKS_AT_ONCE):
            count = min(_BLOCKS_AT_ONCE, num_blocks - block)
            for index in range(num_tiles):
                first, last = num_rows * index // num_tiles, num_rows * (index + 1) // num_tiles
                tile(
                    last - first,
                    rows + first * stride + block * BLOCK * 2,
                    stride,
                    weight + block * _BLOCK_BYTES,
                    sums + first * PANEL * 4,
                    count,
                )

    return multiply


class _BFloat16(ir.Type):
    """The element type of the instruction's operands, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def _tile(num_rows: int) -> Any:
    """``(rows, stride, weight, sums, num_blocks)``: adds the product of rows and panel to the sums.

    Addresses; ``stride`` in bytes between rows. Written as instructions: the sums must stay in registers.
    """
    int32, int64 = ir.IntType(32), ir.IntType(64)
    sixteen, pairs = ir.VectorType(ir.FloatType(), 16), ir.VectorType(_BFloat16(), 32)
    words = ir.VectorType(int32, 16)

    def at(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
        pointer = builder.inttoptr(builder.add(address, ir.Constant(int64, offset)), kind.as_pointer())
        value = builder.load(pointer)
        value.align = align
        return value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, stride, weight, sums, num_blocks = args
        product = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(sixteen, [sixteen, pairs, pairs]),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )
        places = [(row, register) for row in range(num_rows) for register in range(_REGISTERS)]
        totals = {place: cgutils.alloca_once(builder, sixteen) for place in places}
        for row, register in places:
            offset = (row * _REGISTERS + register) * 64
            builder.store(at(builder, sums, offset, sixteen, 4), totals[row, register])
        starts = [builder.add(rows, builder.mul(stride, ir.Constant(int64, row))) for row in range(num_rows)]
        with cgutils.for_range(builder, num_blocks, intp=int64) as loop:
            block = builder.add(weight, builder.mul(loop.index, ir.Constant(int64, _BLOCK_BYTES)))
            shift = builder.mul(loop.index, ir.Constant(int64, BLOCK * 2))
            for pair in range(BLOCK // 2):
                weights = [
                    at(builder, block, (pair * _REGISTERS + register) * 64, pairs, 64)
                    for register in range(_REGISTERS)
                ]
                for row in range(num_rows):
                    number = at(builder, builder.add(starts[row], shift), pair * 4, int32, 4)
                    undefined = ir.Constant(words, ir.Undefined)
                    first = builder.insert_element(undefined, number, ir.Constant(int32, 0))
                    everywhere = builder.shuffle_vector(first, undefined, ir.Constant(words, [0] * 16))
                    operand = builder.bitcast(everywhere, pairs)
                    for register in range(_REGISTERS):
                        total = totals[row, register]
                        value = builder.call(product, [builder.load(total), operand, weights[register]])
                        builder.store(value, total)
        for row, register in places:
            offset = ir.Constant(int64, (row * _REGISTERS + register) * 64)
            pointer = builder.inttoptr(builder.add(sums, offset), sixteen.as_pointer())
            builder.store(builder.load(totals[row, register]), pointer).align = 4
        return context.get_dummy_value()

    def tile(context: Any, rows: Any, stride: Any, weight: Any, sums: Any, num_blocks: Any) -> Any:
        return types.void(*[types.int64] * 5), code

    return intrinsic(tile)
