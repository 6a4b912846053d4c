"""Linear layers of bfloat16 weights with the processor's own bfloat16 products.

The product itself is ``kernels.product`` (AVX-512) or ``kernels.amx``; here are the layers made of it, and
how threads share one: a part is some panels, and a thread multiplies a panel and then finishes it (bias,
gate, residual, rounding).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import carray

from specray.engine.kernels import amx, product, tiles
from specray.engine.kernels.pages import on_large_pages
from specray.engine.kernels.product import BLOCK, BLOCK_BYTES, PANEL
from specray.engine.kernels.rows import HEIGHT, FlatRows, PackedRows, pack, row_place
from specray.engine.kernels.simd import kernel, vectors
from specray.engine.kernels.team import APART, Kernel, Team, as_pointer

_PARTS_PER_THREAD = 4
"""Small enough that threads end together; each begins with weights that nobody has asked for ahead."""
_MAX_ROWS_AT_ONCE = 256
_MAX_BYTES_AT_ONCE = 640 << 10
"""Of rows: they stay in the second cache while some panels are multiplied."""
_MAX_PANELS_AT_ONCE = 8
_MIN_SHARED_WEIGHTS = 262_144
"""Weights below which a second thread costs more than it brings."""

_PLAIN, _PLUS, _GATED = range(3)
(
    _ROWS,
    _STRIDE,
    _SHIFT,
    _NUM_ROWS,
    _ROWS_AT_ONCE,
    _OUT,
    _OUT_STEP,
    _OUT_BLOCK_STEP,
    _IS_FLOAT,
    _SUMMAND,
    _SCRATCH,
    _SCRATCH_SIZE,
    _PANELS_AT_ONCE,
    _BLOCKS_AT_ONCE,
    _SUMS_STEP,
    _WEIGHT,
    _BIAS,
    _NUM_BLOCKS,
    _SIZE,
    _KIND,
) = range(20)
_NUM_ARGS = 20


def can_tile(weight: torch.Tensor) -> bool:
    """Whether this machine has the instruction, and the weight's shape and type fit."""
    has_instruction = llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)
    fits = weight.dtype == torch.bfloat16 and weight.shape[1] % BLOCK == 0
    return bool(has_instruction and weight.device.type == "cpu" and fits)


def _panels(*weights: torch.Tensor) -> torch.Tensor:
    """``[out_features, in_features]`` each to ``[panels, num_weights, ...]``, padded with zeros.

    A panel as the kernel reads it.
    """
    size, in_features = weights[0].shape
    num_panels = -(-size // PANEL)
    panels = on_large_pages((num_panels, len(weights), in_features * PANEL), torch.bfloat16)
    arrange = amx.arrange if tiles.is_usable() else product.arrange
    for index, weight in enumerate(weights):
        padded = weight
        if size % PANEL:
            padded = weight.new_zeros(num_panels * PANEL, in_features)
            padded[:size] = weight
        arranged = arrange(padded)
        panels[:, index].view(arranged.shape).copy_(arranged)
    return panels


def _padded(bias: torch.Tensor) -> torch.Tensor:
    """``[panels, 32]``, float32."""
    padded = torch.zeros(-(-len(bias) // PANEL), PANEL)
    padded.view(-1)[: len(bias)] = bias
    return padded


class _Tiled:
    """Weights in panels and the kernel's arguments that stay the same."""

    __slots__ = (
        "_args", "_args_address", "_has_amx", "_kernel", "_num_parts", "_size", "_sums_width", "_team",
        "bias", "weight",
    )  # fmt: skip

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, size: int, kind: int, team: Team
    ) -> None:
        self.weight, self.bias, self._size, self._team = weight, bias, size, team
        self._num_parts = min(-(-size // PANEL), _PARTS_PER_THREAD * team.size)
        if weight.numel() < _MIN_SHARED_WEIGHTS:
            self._num_parts = 1
        # Asked in every process: code from the cache needs the system's permission too.
        self._has_amx = tiles.is_usable()
        self._kernel = _linear_kernel(self._has_amx)
        self._sums_width = (2 if kind == _GATED else 1) * PANEL
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[[_WEIGHT, _NUM_BLOCKS, _SIZE, _KIND]] = (
            weight.data_ptr(),
            weight.shape[2] // (PANEL * BLOCK),
            size,
            kind,
        )
        self._args[_BIAS] = 0 if bias is None else bias.data_ptr()
        self._args_address = self._args.ctypes.data

    def run(
        self, rows: torch.Tensor, dtype: torch.dtype, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of rows that follow each other; so do the results. Not for two threads at once."""
        assert rows.is_contiguous(), "rows must follow each other"
        assert summand is None or summand.is_contiguous(), "the summand's rows must follow each other"
        out = self._team.empty((len(rows), self._size), dtype)
        is_packed = len(rows) > amx.MAX_ROWS and self._has_amx
        self._multiply(
            pack(rows, self._team) if is_packed else FlatRows(rows),
            FlatRows(out),
            None if summand is None else FlatRows(summand),
        )
        return out

    def run_packed(self, rows: PackedRows, summand: PackedRows | None = None) -> PackedRows:
        """Of packed rows, with AMX; the results are packed. Not for two threads at once."""
        out = PackedRows.empty(self._team, rows.num_rows, self._size)
        self._multiply(rows, out, summand)
        return out

    def run_unpacked(self, rows: PackedRows, dtype: torch.dtype) -> torch.Tensor:
        """Of packed rows, with AMX; the results follow each other. Not for two threads at once."""
        out = self._team.empty((rows.num_rows, self._size), dtype)
        self._multiply(rows, FlatRows(out), None)
        return out

    def _multiply(
        self, rows: FlatRows | PackedRows, out: FlatRows | PackedRows, summand: FlatRows | PackedRows | None
    ) -> None:
        num_rows = rows.num_rows
        if num_rows == 0:
            return
        rows_at_once = num_rows
        if num_rows > amx.MAX_ROWS and self._has_amx:
            rows_at_once = min(-(-num_rows // HEIGHT) * HEIGHT, _MAX_ROWS_AT_ONCE)
        num_ranges = -(-rows_at_once * rows.num_features * 2 // _MAX_BYTES_AT_ONCE) if self._has_amx else 1
        is_whole = rows_at_once == num_rows and num_ranges == 1
        sums_size = rows_at_once * self._sums_width * 4
        # Sums of a panel wait for its next blocks.
        scratch_size = sums_size * (1 if num_ranges == 1 else _MAX_PANELS_AT_ONCE) + APART
        scratch = self._team.empty(self._team.size * scratch_size, torch.uint8)
        args = self._args
        args[: _SUMS_STEP + 1] = (
            *(rows.address, 2 * rows.row_step, 2 * rows.block_step, num_rows, rows_at_once),
            *(out.address, out.row_step, out.block_step, out.data.dtype == torch.float32),
            0 if summand is None else summand.address,
            *(scratch.data_ptr(), scratch_size),
            self._size if is_whole else _MAX_PANELS_AT_ONCE,
            -(-rows.num_features // (BLOCK * num_ranges)),
            0 if num_ranges == 1 else sums_size,
        )
        self._team.run(self._kernel, self._args_address, self._num_parts)


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

    def packed(self, rows: PackedRows) -> PackedRows:
        """Of packed rows, as the following; with AMX, to features that are a multiple of 32."""
        return self._plain.run_packed(rows)

    def packed_precise(self, rows: PackedRows) -> torch.Tensor:
        """``[num_rows, out_features]``, float32, not rounded."""
        return self._plain.run_unpacked(rows, torch.float32)

    def packed_plus(self, rows: PackedRows, summand: PackedRows) -> PackedRows:
        return self._plus.run_packed(rows, summand)


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
        self.weight = _panels(gate, up)
        self.bias = None
        if gate_bias is not None and up_bias is not None:
            self.bias = torch.stack((_padded(gate_bias), _padded(up_bias)), dim=1)
        self._tiled = _Tiled(self.weight, self.bias, gate.shape[0], _GATED, team)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._tiled.run(rows, torch.bfloat16)

    def packed(self, rows: PackedRows) -> PackedRows:
        """Of packed rows; with AMX."""
        return self._tiled.run_packed(rows)


@functools.cache
def _linear_kernel(has_amx: bool) -> Kernel:
    make = functools.partial(_make_linear, amx.multiply_kernel if has_amx else product.multiply_kernel)
    return Kernel("linear-amx" if has_amx else "linear", _NUM_ARGS, make)


def _make_finish() -> Any:
    """``((args, panel, first row, num_rows, gate), sums, first, count)``: from sums to the output.

    Of rows of a panel, counted from the first row; from ``num_rows`` on there are none. ``gate`` is how many
    bytes the gate's sums lie before the others.
    """
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
    def gated(gate: Any, value: Any) -> Any:
        inverse = add(splat(unit), exp(sub(splat(zero), larger(gate, splat(lowest)))))
        return mul(div(gate, inverse), value)

    @kernel()
    def finish_part(args: Any, sums: int, at: int, value: Any, width: int) -> None:
        """A row of a panel of which some is output."""
        store(sums, 0, value)
        for place in range(width):
            number = load_one(sums, place)
            if args[_KIND] == _PLUS:
                number = add_one(number, load_one_half(args[_SUMMAND], at + place))
            if args[_IS_FLOAT]:
                store_one(args[_OUT], at + place, number)
            else:
                store_one_half(args[_OUT], at + place, number)

    @kernel()
    def finish(then: Any, sums: int, first: int, count: int) -> None:
        args, panel, first_row, num_rows, gate = then
        size, step, kind = args[_SIZE], args[_OUT_STEP], args[_KIND]
        bias, out, summand, is_float = args[_BIAS], args[_OUT], args[_SUMMAND], args[_IS_FLOAT]
        num_layers = 2 if kind == _GATED else 1
        shift, gate_shift = splat(zero), splat(zero)
        if bias:
            shift = load(bias, ((panel + 1) * num_layers - 1) * PANEL)
            gate_shift = load(bias, 2 * panel * PANEL) if kind == _GATED else shift
        width = min(PANEL, size - panel * PANEL)
        # Rows of one group, or such as follow each other: a step apart.
        at = row_place(first_row + first, size, step) + panel * args[_OUT_BLOCK_STEP]
        for index in range(0, min(count, num_rows - first) * PANEL, PANEL):
            value = add(load(sums, index), shift)
            if kind == _GATED:
                value = gated(add(load(sums - gate, index), gate_shift), value)
            if width < PANEL:
                finish_part(args, sums + index * 4, at, value, width)
            else:
                if kind == _PLUS:
                    value = add(value, load_half(summand, at))
                if is_float:
                    store(out, at, value)
                else:
                    store_half(out, at, value)
            at += step

    return finish


def _make_linear(make_multiply: Callable[[Any], Any]) -> Any:
    begin, multiply, finish_all = make_multiply(_make_finish())

    @kernel()
    def do_panel(
        args: Any, sums: int, panel: int, rows: tuple[int, int], blocks: tuple[int, int], end: int
    ) -> None:
        """Some rows and blocks; sums of the gate, and behind them of what it is for."""
        num_blocks, num_layers = args[_NUM_BLOCKS], 2 if args[_KIND] == _GATED else 1
        first_row, num_rows = rows[0], rows[1] - rows[0]
        # Also of packed rows, whose groups are as large as they were; the last one is full.
        place = args[_ROWS] + first_row * num_blocks * BLOCK * 2
        gate = args[_ROWS_AT_ONCE] * PANEL * 4
        for layer in range(num_layers):
            weight = args[_WEIGHT] + (panel * num_layers + layer) * num_blocks * BLOCK_BYTES
            num_finished = num_rows if layer == num_layers - 1 else 0
            then, total = (args, panel, first_row, num_finished, gate), sums + layer * gate
            steps = args[_STRIDE], args[_SHIFT]
            multiply(place, steps, weight, total, num_rows, num_blocks, blocks, end, then)

    def linear(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_blocks = args[_NUM_ROWS], args[_NUM_BLOCKS]
        rows_at_once, blocks_at_once = args[_ROWS_AT_ONCE], args[_BLOCKS_AT_ONCE]
        sums = args[_SCRATCH] + thread * args[_SCRATCH_SIZE]
        num_panels = (args[_SIZE] + PANEL - 1) // PANEL
        first_panel, last_panel = num_panels * part // num_parts, num_panels * (part + 1) // num_parts
        num_layers = 2 if args[_KIND] == _GATED else 1
        end = args[_WEIGHT] + last_panel * num_layers * num_blocks * BLOCK_BYTES
        begin(num_rows)
        for group in range(first_panel, last_panel, args[_PANELS_AT_ONCE]):
            last = min(last_panel, group + args[_PANELS_AT_ONCE])
            for first_row in range(0, num_rows, rows_at_once):
                rows = first_row, min(num_rows, first_row + rows_at_once)
                for block in range(0, num_blocks, blocks_at_once):
                    blocks = block, min(num_blocks, block + blocks_at_once)
                    for panel in range(group, last):
                        do_panel(args, sums + (panel - group) * args[_SUMS_STEP], panel, rows, blocks, end)
        finish_all()

    return linear
