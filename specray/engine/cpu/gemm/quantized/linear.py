"""Linear layers with quantised weights on CPU: products of integer rows, and epilogues as elsewhere.

A part of a job is some panels. One row is bound by reading the weights, which a layer reads once per step.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import carray

from specray.engine.activation import Activation
from specray.engine.cpu.gemm.epilogue import GATED, PLAIN, PLUS, epilogue_kernel
from specray.engine.cpu.gemm.quantized.integer_rows import BLOCK_BYTES, FACTOR_BYTES, integer_rows
from specray.engine.cpu.gemm.quantized.layout import Layout, pack_panels
from specray.engine.cpu.gemm.quantized.tile import MAX_ROWS, make_tile
from specray.engine.cpu.gemm.rows import HEIGHT
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer
from specray.engine.weights.quantization import GROUP, Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight

_PARTS_PER_THREAD = 4
"""Parts per thread: enough that threads end together, few since each part starts with weights not
prefetched."""
MIN_SHARED_WEIGHTS = 262_144
"""Minimum number of weights for which a second thread pays off."""
_ROWS_AT_ONCE = 384
"""Integer rows whose sums a thread holds at once, in L2; a multiple of a tile, and of two."""
_GROUPS_AT_ONCE = 8
"""Groups of a panel at once, in L1, where they are read several times."""
_AHEAD = 8192
"""Prefetch distance in bytes."""

(
    _INTEGERS,
    _FACTORS,
    _NUM_ROWS,
    _OUT,
    _IS_FLOAT,
    _SUMMAND,
    _SCRATCH,
    _SCRATCH_SIZE,
    _WEIGHT,
    _BIAS,
    _NUM_GROUPS,
    _SIZE,
    _KIND,
    _ROWS_EACH,
) = range(14)
_NUM_ARGS = 14


def has_kernels() -> bool:
    """Whether this processor runs the kernels: any with AVX2, and with conversions from float16."""
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx2", "fma", "f16c"))


class _Quantized:
    """Weights in panels, and the kernel's arguments that do not change between calls."""

    __slots__ = ("_args", "_args_address", "_kernel", "_num_parts", "_size", "_thread_pool", "bias", "weight")

    def __init__(
        self,
        format: Quantization,
        weight: torch.Tensor,
        bias: torch.Tensor,
        size: int,
        kind: int,
        thread_pool: ThreadPool,
        activation: Activation = Activation.SILU,
    ) -> None:
        self.weight, self.bias, self._size, self._thread_pool = weight, bias, size, thread_pool
        num_weights = weight.shape[0] * weight.shape[1] * weight.shape[2] * PANEL * GROUP
        self._num_parts = min(weight.shape[0], _PARTS_PER_THREAD * thread_pool.size)
        if num_weights < MIN_SHARED_WEIGHTS:
            self._num_parts = 1
        self._kernel = _linear_kernel(format, activation)
        self._args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self._args[[_WEIGHT, _BIAS]] = weight.data_ptr(), bias.data_ptr()
        self._args[[_NUM_GROUPS, _SIZE, _KIND]] = weight.shape[2], size, kind
        self._args_address = self._args.ctypes.data

    def run(
        self, rows: torch.Tensor, dtype: torch.dtype, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiplies rows, bfloat16 or float32; a summand has the output's type. Not thread-safe."""
        assert rows.is_contiguous(), "rows must follow each other"
        assert summand is None or (summand.is_contiguous() and summand.dtype == dtype), "as the output"
        out = self._thread_pool.empty((len(rows), self._size), dtype)
        if len(rows) == 0:
            return out
        integers = integer_rows(rows, self._thread_pool)
        num_sums = min(integers.num_rows, _ROWS_AT_ONCE) * (2 if self._args[_KIND] == GATED else 1)
        scratch_size = num_sums * PANEL * 4 + APART
        scratch = self._thread_pool.empty(self._thread_pool.size * scratch_size, torch.uint8)
        args = self._args
        args[: _SCRATCH_SIZE + 1] = (
            *(integers.integers.data_ptr(), integers.factors.data_ptr(), integers.num_rows),
            *(out.data_ptr(), dtype == torch.float32, 0 if summand is None else summand.data_ptr()),
            *(scratch.data_ptr(), scratch_size),
        )
        args[_ROWS_EACH] = integers.num_rows // len(rows)
        self._thread_pool.run(self._kernel, self._args_address, self._num_parts)
        return out


class QuantizedLinear:
    """Computes ``x @ weight.T + bias``; implements ``linear.Linear``."""

    __slots__ = ("_dtype", "_plain", "_plus", "format", "in_features", "num_bytes", "num_weights", "weight")

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        thread_pool: ThreadPool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._dtype, self.format = dtype, weight.format
        size, self.in_features = weight.codes.shape
        self.num_weights = weight.codes.numel()
        self.weight = pack_panels(weight)
        """uint8 ``[panels, 1, groups, group_bytes]``."""
        self.num_bytes = self.weight.nbytes
        padded = _padded(bias, size)
        self._plain, self._plus = (
            _Quantized(self.format, self.weight, padded, size, kind, thread_pool) for kind in (PLAIN, PLUS)
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._plain.run(rows, self._dtype)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self._plain.run(rows, torch.float32)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._plus.run(rows, self._dtype, summand)


class QuantizedGate:
    """Computes ``activation(gate(x)) * up(x)``; implements ``linear.Gate``."""

    __slots__ = ("_dtype", "_gated", "in_features", "num_bytes", "num_weights", "weight")

    def __init__(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        thread_pool: ThreadPool,
        dtype: torch.dtype = torch.bfloat16,
        activation: Activation = Activation.SILU,
    ) -> None:
        self._dtype = dtype
        size, self.in_features = gate.codes.shape
        self.num_weights = 2 * gate.codes.numel()
        # A gate panel, then the up panel of the same features.
        self.weight = pack_panels(gate, up)
        self.num_bytes = self.weight.nbytes
        bias = torch.stack([_padded(bias, size) for bias in (gate_bias, up_bias)], dim=1)
        self._gated = _Quantized(gate.format, self.weight, bias, size, GATED, thread_pool, activation)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._gated.run(rows, self._dtype)


def _padded(bias: torch.Tensor | None, size: int) -> torch.Tensor:
    """Pads a bias to float32 ``[panels, 32]``; zeros without one."""
    padded = torch.zeros(-(-size // PANEL), PANEL)
    if bias is not None:
        padded.view(-1)[:size] = bias
    return padded


@functools.cache
def _linear_kernel(format: Quantization, activation: Activation) -> Kernel:
    name = f"linear-{format}" if activation is Activation.SILU else f"linear-{format}-{activation}"
    return Kernel(name, _NUM_ARGS, functools.partial(_make_linear, Layout(format), activation))


def _make_linear(layout: Layout, activation: Activation) -> Any:
    finish, multiply = epilogue_kernel(activation), _make_multiply(layout)
    group_bytes = layout.group_bytes
    line = vectors(PANEL, "float32")
    load, store, add = line.load, line.store, line.add

    @kernel()
    def merge(sums: int, num_rows: int) -> None:
        """Adds the sums of each row's two integer rows."""
        for row in range(num_rows):
            first = load(sums, 2 * row * PANEL)
            store(sums, row * PANEL, add(first, load(sums, (2 * row + 1) * PANEL)))

    @kernel()
    def epilogue(args: Any, sums: int, panel: int, first_row: int, num_rows: int, gate: int) -> Any:
        """Epilogue of some rows of a panel, whose gate's sums lie ``gate`` bytes before ``sums``."""
        kind, is_float, size = args[_KIND], args[_IS_FLOAT], args[_SIZE]
        at = first_row * size + panel * PANEL
        bias = args[_BIAS] + panel * PANEL * 4
        if kind == GATED:
            bias += (panel + 1) * PANEL * 4
        item = 4 if is_float else 2
        out, summand = args[_OUT] + at * item, args[_SUMMAND] + at * item
        shape = (num_rows, min(PANEL, size - panel * PANEL))
        return kind, is_float, sums, bias, out, summand, gate, (size, HEIGHT * size), shape

    def linear(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_groups, each = args[_NUM_ROWS], args[_NUM_GROUPS], args[_ROWS_EACH]
        num_layers = 2 if args[_KIND] == GATED else 1
        num_panels = (args[_SIZE] + PANEL - 1) // PANEL
        sums = args[_SCRATCH] + thread * args[_SCRATCH_SIZE]
        gate = min(num_rows, _ROWS_AT_ONCE) * PANEL * 4 * (num_layers - 1)
        for panel in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            for first in range(0, num_rows, _ROWS_AT_ONCE):
                count = min(_ROWS_AT_ONCE, num_rows - first)
                for layer in range(num_layers):
                    weight = args[_WEIGHT] + (panel * num_layers + layer) * num_groups * group_bytes
                    totals = sums + layer * gate
                    multiply(
                        args[_INTEGERS] + first * BLOCK_BYTES,
                        args[_FACTORS] + first * FACTOR_BYTES,
                        num_rows,
                        weight,
                        totals,
                        count,
                        num_groups,
                    )
                    if each == 2:
                        merge(totals, count // 2)
                done = epilogue(args, sums + gate, panel, first // each, count // each, gate)
                finish(done, 0, count // each)

    return linear


def _make_multiply(layout: Layout) -> Any:
    """Makes ``(integers, factors, all_rows, weight, sums, num_rows, num_groups)``: sums of rows and a panel.

    Addresses are of the first of these rows; ``all_rows`` is the number of rows of a block.
    """
    tile, group_bytes = make_tile(layout), layout.group_bytes
    line = vectors(PANEL, "float32")
    store, splat, zero = line.store, line.splat, np.float32(0.0)

    @kernel()
    def multiply(
        integers: int, factors: int, all_rows: int, weight: int, sums: int, num_rows: int, num_groups: int
    ) -> None:
        for row in range(num_rows):
            store(sums, row * PANEL, splat(zero))
        num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
        groups_at_once = num_groups if num_rows == 1 else _GROUPS_AT_ONCE
        for group in range(0, num_groups, groups_at_once):
            count = min(groups_at_once, num_groups - group)
            piece = weight + group * group_bytes
            for index in range(num_tiles):
                first, last = num_rows * index // num_tiles, num_rows * (index + 1) // num_tiles
                # Prefetching cached data is almost free.
                ahead, step = (piece + _AHEAD, group_bytes) if index == 0 else (sums, 0)
                place = group * all_rows + first
                tile(
                    last - first,
                    integers + place * BLOCK_BYTES,
                    factors + place * FACTOR_BYTES,
                    all_rows,
                    piece,
                    sums + first * PANEL * 4,
                    count,
                    ahead,
                    step,
                )

    return multiply
