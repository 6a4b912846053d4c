"""Linear layers with bfloat16 weights on CPU.

The product itself is in ``gemm.vector`` (AVX) or ``gemm.amx``. This module has the layers made of it and the
split over threads: a part is some panels, and a thread multiplies a panel and runs its epilogue; with AMX and
many rows, it does so while it multiplies the next panel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.activation import Activation
from specray.engine.cpu.gemm import amx, vector
from specray.engine.cpu.gemm.epilogue import GATED, PLAIN, PLUS, epilogue_kernel
from specray.engine.cpu.gemm.rows import HEIGHT, FlatRows, PackedRows, pack, row_place
from specray.engine.cpu.gemm.vector import BLOCK, BLOCK_BYTES, BLOCKS_AT_ONCE, CLOCK_BITS, FLOAT_STRIDE, PANEL
from specray.engine.cpu.huge_pages import empty_on_huge_pages
from specray.engine.cpu.isa import Isa, fastest_isa
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer

_PARTS_PER_THREAD = 4
"""Parts per thread: enough that threads end together, few since each part starts with weights not
prefetched."""
_MAX_ROWS_AT_ONCE = 512
_MAX_BYTES_AT_ONCE = 1100 << 10
"""Maximum bytes of rows at once, which stay in L2 while some panels are multiplied."""
_MAX_PANELS_AT_ONCE = 8
_FLOAT_ROWS_AT_ONCE = 256
"""Rows that a thread converts to float32 at once, for eight panels: two instructions per 256 products."""
_MIN_OVERLAPPED_ROWS = 97
"""Minimum rows for overlapped epilogues. With fewer, memory is the bound and overlap costs up to 5 %."""
_MIN_SHARED_WEIGHTS = 262_144
"""Minimum number of weights for which a second thread pays off."""

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
    _NUM_SUMS,
    _WEIGHT,
    _BIAS,
    _NUM_BLOCKS,
    _SIZE,
    _KIND,
    _FLOAT_ROWS,
) = range(22)
_NUM_ARGS = 22


def can_tile(weight: torch.Tensor) -> bool:
    """Whether this machine has a kernel for the weight's shape and type."""
    fits = weight.dtype == torch.bfloat16 and weight.shape[1] % BLOCK == 0
    return bool(fits and weight.device.type == "cpu" and fastest_isa() is not None)


def _panels(*weights: torch.Tensor) -> torch.Tensor:
    """Packs weights ``[out_features, in_features]`` into ``[panels, num_weights, ...]``, padded with zeros.

    The layout of a panel is that of the kernel.
    """
    size, in_features = weights[0].shape
    num_panels = -(-size // PANEL)
    panels = empty_on_huge_pages((num_panels, len(weights), in_features * PANEL), torch.bfloat16)
    arrange = amx.arrange if fastest_isa() is Isa.AMX else vector.arrange
    for index, weight in enumerate(weights):
        padded = weight
        if size % PANEL:
            padded = weight.new_zeros(num_panels * PANEL, in_features)
            padded[:size] = weight
        arranged = arrange(padded)
        panels[:, index].view(arranged.shape).copy_(arranged)
    return panels


def _padded(bias: torch.Tensor | None, size: int) -> torch.Tensor:
    """Pads a bias to float32 ``[panels, 32]``; zeros without one."""
    padded = torch.zeros(-(-size // PANEL), PANEL)
    if bias is not None:
        padded.view(-1)[:size] = bias
    return padded


class _Tiled:
    """Weights in panels, and the kernel's arguments that do not change between calls."""

    __slots__ = (
        "_args", "_args_address", "_has_amx", "_has_float_rows", "_kernel", "_num_parts", "_size",
        "_sums_width", "_thread_pool", "bias", "weight",
    )  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        size: int,
        kind: int,
        thread_pool: ThreadPool,
        activation: Activation = Activation.SILU,
    ) -> None:
        self.weight, self.bias, self._size, self._thread_pool = weight, bias, size, thread_pool
        self._num_parts = min(-(-size // PANEL), _PARTS_PER_THREAD * thread_pool.size)
        if weight.numel() < _MIN_SHARED_WEIGHTS:
            self._num_parts = 1
        # Checked in every process: cached code needs the system's permission for AMX too.
        isa = fastest_isa()
        assert isa is not None, "can_tile was asked"
        self._has_amx, self._has_float_rows = isa is Isa.AMX, isa.has_float_rows
        self._kernel = _linear_kernel(isa, activation)
        self._sums_width = (2 if kind == GATED else 1) * PANEL
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[[_WEIGHT, _NUM_BLOCKS, _SIZE, _KIND]] = (
            weight.data_ptr(),
            weight.shape[2] // (PANEL * BLOCK),
            size,
            kind,
        )
        self._args[_BIAS] = bias.data_ptr()
        self._args_address = self._args.ctypes.data

    def run(
        self, rows: torch.Tensor, dtype: torch.dtype, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiplies flat rows to flat rows. Not thread-safe."""
        assert rows.is_contiguous(), "rows must follow each other"
        assert summand is None or summand.is_contiguous(), "the summand's rows must follow each other"
        out = self._thread_pool.empty((len(rows), self._size), dtype)
        is_packed = len(rows) > amx.MAX_ROWS and self._has_amx
        self._multiply(
            pack(rows, self._thread_pool) if is_packed else FlatRows(rows),
            FlatRows(out),
            None if summand is None else FlatRows(summand),
        )
        return out

    def run_packed(self, rows: PackedRows, summand: PackedRows | None = None) -> PackedRows:
        """Multiplies packed rows to packed rows, with AMX. Not thread-safe."""
        out = PackedRows.empty(self._thread_pool, rows.num_rows, self._size)
        self._multiply(rows, out, summand)
        return out

    def run_unpacked(self, rows: PackedRows, dtype: torch.dtype) -> torch.Tensor:
        """Multiplies packed rows to flat rows, with AMX. Not thread-safe."""
        out = self._thread_pool.empty((rows.num_rows, self._size), dtype)
        self._multiply(rows, FlatRows(out), None)
        return out

    def _multiply(
        self, rows: FlatRows | PackedRows, out: FlatRows | PackedRows, summand: FlatRows | PackedRows | None
    ) -> None:
        num_rows = rows.num_rows
        if num_rows == 0:
            return
        rows_at_once, row_bytes = num_rows, 4 if self._has_float_rows else 2
        if self._has_float_rows:
            rows_at_once = min(num_rows, _FLOAT_ROWS_AT_ONCE)
        elif num_rows > amx.MAX_ROWS and self._has_amx:
            rows_at_once = min(-(-num_rows // HEIGHT) * HEIGHT, _MAX_ROWS_AT_ONCE)
        num_bytes = rows_at_once * rows.num_features * row_bytes
        has_ranges = self._has_amx or self._has_float_rows
        num_ranges = -(-num_bytes // _MAX_BYTES_AT_ONCE) if has_ranges else 1
        is_whole = rows_at_once == num_rows and num_ranges == 1
        sums_size = rows_at_once * self._sums_width * 4
        # A panel's sums wait for its next blocks, or for their epilogue during the next panel's product.
        num_sums = 1 if not self._has_amx or num_rows < _MIN_OVERLAPPED_ROWS else 2
        if num_ranges > 1:
            num_sums = _MAX_PANELS_AT_ONCE
        blocks_at_once = -(-rows.num_features // (BLOCK * num_ranges))
        all_sums_size = scratch_size = sums_size * num_sums + APART
        if self._has_float_rows:
            num_pieces = -(-blocks_at_once // BLOCKS_AT_ONCE)
            blocks_at_once = num_pieces * BLOCKS_AT_ONCE
            scratch_size += rows_at_once * num_pieces * FLOAT_STRIDE
        scratch = self._thread_pool.empty(self._thread_pool.size * scratch_size, torch.uint8)
        args = self._args
        args[: _NUM_SUMS + 1] = (
            *(rows.address, 2 * rows.row_step, 2 * rows.block_step, num_rows, rows_at_once),
            *(out.address, out.row_step, out.block_step, out.data.dtype == torch.float32),
            0 if summand is None else summand.address,
            *(scratch.data_ptr(), scratch_size),
            self._size if is_whole else _MAX_PANELS_AT_ONCE,
            blocks_at_once,
            sums_size,
            num_sums,
        )
        args[_FLOAT_ROWS] = all_sums_size
        self._thread_pool.run(self._kernel, self._args_address, self._num_parts)


class TiledLinear:
    """Computes ``x @ weight.T + bias`` for bfloat16 rows; implements ``linear.Linear``."""

    __slots__ = ("_plain", "_plus", "bias", "in_features", "num_bytes", "num_weights", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, thread_pool: ThreadPool) -> None:
        size, self.in_features = weight.shape
        self.num_weights, self.num_bytes = weight.numel(), weight.nbytes
        self.weight = _panels(weight)
        self.bias = _padded(bias, size)
        self._plain = _Tiled(self.weight, self.bias, size, PLAIN, thread_pool)
        self._plus = _Tiled(self.weight, self.bias, size, PLUS, thread_pool)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._plain.run(rows, torch.bfloat16)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        """The layer with float32 output, not rounded."""
        return self._plain.run(rows, torch.float32)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._plus.run(rows, torch.bfloat16, summand)

    def packed(self, rows: PackedRows) -> PackedRows:
        """The layer on packed rows, as the methods below; needs AMX and whole panels of output features."""
        return self._plain.run_packed(rows)

    def packed_precise(self, rows: PackedRows) -> torch.Tensor:
        """The layer with flat float32 output ``[num_rows, out_features]``, not rounded."""
        return self._plain.run_unpacked(rows, torch.float32)

    def packed_plus(self, rows: PackedRows, summand: PackedRows) -> PackedRows:
        return self._plus.run_packed(rows, summand)


class TiledGate:
    """Computes ``activation(gate(x)) * up(x)`` for bfloat16 rows; implements ``linear.Gate``."""

    __slots__ = ("_tiled", "bias", "in_features", "num_bytes", "num_weights", "weight")

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        thread_pool: ThreadPool,
        activation: Activation = Activation.SILU,
    ) -> None:
        self.in_features = gate.shape[1]
        self.num_weights, self.num_bytes = 2 * gate.numel(), 2 * gate.nbytes
        # A gate panel, then the up panel of the same features.
        self.weight = _panels(gate, up)
        self.bias = torch.stack([_padded(bias, len(gate)) for bias in (gate_bias, up_bias)], dim=1)
        self._tiled = _Tiled(self.weight, self.bias, gate.shape[0], GATED, thread_pool, activation)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._tiled.run(rows, torch.bfloat16)

    def packed(self, rows: PackedRows) -> PackedRows:
        """The layer on packed rows; needs AMX."""
        return self._tiled.run_packed(rows)


@functools.cache
def _linear_kernel(isa: Isa, activation: Activation) -> Kernel:
    makers: dict[Isa, Callable[[Any], Any]] = {
        Isa.AMX: amx.multiply_kernel,
        Isa.AVX512_BF16: functools.partial(vector.multiply_kernel, vector.AVX512_BF16),
        Isa.AVX512_FMA: functools.partial(vector.multiply_kernel, vector.AVX512_FMA),
        Isa.AVX2_FMA: functools.partial(vector.multiply_kernel, vector.AVX2_FMA),
    }
    name = f"linear-{isa}" if activation is Activation.SILU else f"linear-{isa}-{activation}"
    return Kernel(name, _NUM_ARGS, functools.partial(_make_linear, makers[isa], isa, activation))


def _make_linear(make_multiply: Callable[[Any], Any], isa: Isa, activation: Activation) -> Any:
    has_tiles, has_float_rows = isa is Isa.AMX, isa.has_float_rows
    finish = epilogue_kernel(activation)
    begin, multiply, finish_all = make_multiply(finish)
    load_half, store = vectors(BLOCK, "bfloat16").load, vectors(BLOCK, "float32").store

    @kernel()
    def place_rows(args: Any, floats: int, rows: tuple[int, int], blocks: tuple[int, int]) -> Any:
        """Prepares some rows for products; returns (address of block 0, (bytes to next row, next block))."""
        # Right for packed rows too: groups before this one are full.
        place = args[_ROWS] + rows[0] * args[_NUM_BLOCKS] * BLOCK * 2
        if not has_float_rows:
            return place, (args[_STRIDE], args[_SHIFT])
        shift = rows[1] * (FLOAT_STRIDE // BLOCKS_AT_ONCE)
        for first in range(blocks[0], blocks[1], BLOCKS_AT_ONCE):
            piece = floats + (first - blocks[0]) * shift
            for row in range(rows[1]):
                for block in range(first, min(blocks[1], first + BLOCKS_AT_ONCE)):
                    numbers = load_half(place + row * args[_STRIDE], block * BLOCK)
                    store(piece + row * FLOAT_STRIDE, (block - first) * BLOCK, numbers)
        return floats - blocks[0] * shift, (FLOAT_STRIDE, shift)

    @kernel()
    def epilogue(args: Any, sums: int, panel: int, first_row: int, num_rows: int) -> Any:
        """Epilogue of some rows of a panel, whose sums are complete."""
        kind, is_float, size = args[_KIND], args[_IS_FLOAT], args[_SIZE]
        at = row_place(first_row, size, args[_OUT_STEP]) + panel * args[_OUT_BLOCK_STEP]
        bias, gate = args[_BIAS] + panel * PANEL * 4, 0
        if kind == GATED:
            bias, gate = bias + (panel + 1) * PANEL * 4, args[_ROWS_AT_ONCE] * PANEL * 4
        out, summand = args[_OUT] + at * (4 if is_float else 2), args[_SUMMAND] + at * 2
        # Groups of rows have one size in both layouts.
        steps, shape = (args[_OUT_STEP], HEIGHT * size), (num_rows, min(PANEL, size - panel * PANEL))
        return kind, is_float, sums + gate, bias, out, summand, gate, steps, shape

    @kernel()
    def do_panel(
        args: Any,
        sums: int,
        panel: int,
        num_rows: int,
        places: tuple[int, tuple[int, int]],
        blocks: tuple[int, int],
        end: int,
        waiting: Any,
    ) -> None:
        """Multiplies some rows and blocks of a panel: sums of the gate first, then of ``up``.

        Finishes all rows of the waiting panel meanwhile, spread evenly over the products.
        """
        num_blocks, num_layers = args[_NUM_BLOCKS], 2 if args[_KIND] == GATED else 1
        place, steps = places
        num_products = num_layers * ((num_rows + HEIGHT - 1) // HEIGHT) * (blocks[1] - blocks[0])
        clock, pace = 0, ((waiting[-1][0] << CLOCK_BITS) + num_products - 1) // num_products
        for layer in range(num_layers):
            weight = args[_WEIGHT] + (panel * num_layers + layer) * num_blocks * BLOCK_BYTES
            total, due = sums + layer * args[_ROWS_AT_ONCE] * PANEL * 4, (clock, pace)
            clock = multiply(place, steps, weight, total, num_rows, num_blocks, blocks, end, waiting, due)

    def linear(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_blocks = args[_NUM_ROWS], args[_NUM_BLOCKS]
        rows_at_once, blocks_at_once = args[_ROWS_AT_ONCE], args[_BLOCKS_AT_ONCE]
        num_panels = (args[_SIZE] + PANEL - 1) // PANEL
        first_panel, last_panel = num_panels * part // num_parts, num_panels * (part + 1) // num_parts
        num_layers = 2 if args[_KIND] == GATED else 1
        end = args[_WEIGHT] + last_panel * num_layers * num_blocks * BLOCK_BYTES
        first_sums = sums = args[_SCRATCH] + thread * args[_SCRATCH_SIZE]
        floats = first_sums + args[_FLOAT_ROWS]
        waiting = epilogue(args, sums, first_panel, 0, 0)
        begin(num_rows)
        for group in range(first_panel, last_panel, args[_PANELS_AT_ONCE]):
            last = min(last_panel, group + args[_PANELS_AT_ONCE])
            for first_row in range(0, num_rows, rows_at_once):
                rows = first_row, min(num_rows - first_row, rows_at_once)
                for block in range(0, num_blocks, blocks_at_once):
                    blocks = block, min(num_blocks, block + blocks_at_once)
                    places = place_rows(args, floats, rows, blocks)
                    for panel in range(group, last):
                        place = first_sums + (panel - group) % args[_NUM_SUMS] * args[_SUMS_STEP]
                        if place == sums or not has_tiles:
                            # The sums' memory is needed now, or there is nothing to overlap with.
                            finish(waiting, 0, num_rows)
                            waiting = epilogue(args, place, panel, 0, 0)
                        do_panel(args, place, panel, rows[1], places, blocks, end, waiting)
                        num_done = rows[1] if blocks[1] == num_blocks else 0
                        sums, waiting = place, epilogue(args, place, panel, first_row, num_done)
        finish(waiting, 0, num_rows)
        finish_all()

    return linear
