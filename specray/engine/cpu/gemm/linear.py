"""Linear layers with bfloat16 or float32 weights on CPU.

The product itself is in ``gemm.vector`` (AVX) or ``gemm.amx``, its split over threads in ``gemm.product``.
This module has the layers made of it.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F

from specray.engine.activation import Activation, Joint
from specray.engine.cpu.experts.grouped import ArgPlaces, Prepared
from specray.engine.cpu.gemm import amx, product, vector
from specray.engine.cpu.gemm.epilogue import GATED, PLAIN, PLUS
from specray.engine.cpu.gemm.rows import HEIGHT, FlatRows, PackedRows, pack
from specray.engine.cpu.gemm.vector import BLOCK, BLOCKS_AT_ONCE, FLOAT_STRIDE, PANEL
from specray.engine.cpu.huge_pages import empty_on_huge_pages
from specray.engine.cpu.isa import Isa, fastest_isa
from specray.engine.cpu.thread_pool import APART, ThreadPool

PARTS_PER_THREAD = 4
"""Parts per thread: enough that threads end together, few since each part starts with weights not
prefetched."""
MAX_ROWS_AT_ONCE = 512
MAX_BYTES_AT_ONCE = 1100 << 10
"""Maximum bytes of rows at once, which stay in L2 while some panels are multiplied."""
_MAX_PANELS_AT_ONCE = 8
_FLOAT_ROWS_AT_ONCE = 256
"""Rows that a thread converts to float32 at once, for eight panels: two instructions per 256 products."""
_MIN_OVERLAPPED_ROWS = 97
"""Minimum rows for overlapped epilogues. With fewer, memory is the bound and overlap costs up to 5 %."""
MIN_SHARED_WEIGHTS = 262_144
"""Minimum number of weights for which a second thread pays off."""


def can_tile(weight: torch.Tensor) -> bool:
    """Whether this machine has a kernel for the weight's type."""
    fits = weight.dtype in (torch.bfloat16, torch.float32) and weight.device.type == "cpu"
    return fits and fastest_isa() is not None


def _whole_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Rows or weights with zeros after the last feature, up to a multiple of ``BLOCK`` features."""
    return F.pad(rows, (0, -rows.shape[1] % BLOCK)) if rows.shape[1] % BLOCK else rows


def _panels(*weights: torch.Tensor) -> torch.Tensor:
    """Packs weights ``[out_features, in_features]`` into ``[panels, num_weights, ...]``, padded with zeros.

    The layout of a panel is that of the kernel.
    """
    weights = tuple(map(_whole_blocks, weights))
    size, in_features = weights[0].shape
    num_panels = -(-size // PANEL)
    dtype = weights[0].dtype
    panels = empty_on_huge_pages((num_panels, len(weights), in_features * PANEL), dtype)
    has_amx = fastest_isa() is Isa.AMX and dtype == torch.bfloat16
    arrange = amx.arrange if has_amx else vector.arrange
    for index, weight in enumerate(weights):
        padded = weight
        if size % PANEL:
            padded = weight.new_zeros(num_panels * PANEL, in_features)
            padded[:size] = weight
        arranged = arrange(padded)
        panels[:, index].view(arranged.shape).copy_(arranged)
    return panels


def padded_bias(bias: torch.Tensor | None, size: int) -> torch.Tensor:
    """Pads a bias to float32 ``[panels, 32]``; zeros without one."""
    padded = torch.zeros(-(-size // PANEL), PANEL)
    if bias is not None:
        padded.view(-1)[:size] = bias
    return padded


class TiledProduct:
    """Weights in panels, and the kernel's arguments that do not change between calls."""

    __slots__ = (
        "_args_address", "_has_amx", "_has_float_rows", "_kernel_with_delta", "_sums_width", "args", "bias",
        "kernel", "num_panels", "num_parts", "num_weights", "size", "thread_pool", "weight",
    )  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        size: int,
        kind: int,
        thread_pool: ThreadPool,
        joint: Joint = Activation.SILU,
    ) -> None:
        self.weight, self.bias, self.size, self.thread_pool = weight, bias, size, thread_pool
        self.num_panels, self.num_weights = -(-size // PANEL), weight.numel()
        self.num_parts = min(self.num_panels, PARTS_PER_THREAD * thread_pool.size)
        if self.num_weights < MIN_SHARED_WEIGHTS:
            self.num_parts = 1
        # Checked in every process: cached code needs the system's permission for AMX too.
        isa = fastest_isa()
        assert isa is not None, "can_tile was asked"
        is_float = weight.dtype == torch.float32
        self._has_amx, self._has_float_rows = isa is Isa.AMX and not is_float, isa.has_float_rows or is_float
        dtype = str(weight.dtype).removeprefix("torch.")
        self.kernel = product.linear_kernel(isa, joint, dtype)
        self._kernel_with_delta = functools.partial(product.linear_kernel, isa, joint, dtype, has_delta=True)
        self._sums_width = (2 if kind == GATED else 1) * PANEL
        self.args = np.zeros(product.NUM_ARGS, dtype=np.int64)
        self.args[[product.WEIGHT, product.NUM_BLOCKS, product.SIZE, product.KIND]] = (
            weight.data_ptr(),
            weight.shape[2] // (PANEL * BLOCK),
            size,
            kind,
        )
        self.args[product.BIAS] = bias.data_ptr()
        self._args_address = self.args.ctypes.data

    def run(
        self,
        rows: torch.Tensor,
        dtype: torch.dtype,
        summand: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiplies flat rows to flat rows. Not thread-safe.

        Args:
            delta: float32 ``[num_rows, 32 * panels]``, of a gate those of the gate first, that is added to
                the sums before all else.
        """
        rows = _whole_blocks(rows)
        assert rows.is_contiguous(), "rows must follow each other"
        assert summand is None or summand.is_contiguous(), "the summand's rows must follow each other"
        out = self.thread_pool.empty((len(rows), self.size), dtype)
        is_packed = len(rows) > amx.MAX_ROWS and self._has_amx
        self._multiply(
            pack(rows, self.thread_pool) if is_packed else FlatRows(rows),
            FlatRows(out),
            None if summand is None else FlatRows(summand),
            delta,
        )
        return out

    def run_packed(self, rows: PackedRows, summand: PackedRows | None = None) -> PackedRows:
        """Multiplies packed rows to packed rows, with AMX. Not thread-safe."""
        out = PackedRows.empty(self.thread_pool, rows.num_rows, self.size)
        self._multiply(rows, out, summand)
        return out

    def run_unpacked(self, rows: PackedRows, dtype: torch.dtype) -> torch.Tensor:
        """Multiplies packed rows to flat rows, with AMX. Not thread-safe."""
        out = self.thread_pool.empty((rows.num_rows, self.size), dtype)
        self._multiply(rows, FlatRows(out), None)
        return out

    @property
    def places(self) -> ArgPlaces:
        layer, rows = (product.WEIGHT, product.BIAS), (product.ROWS, product.OUT, product.OUT)
        return ArgPlaces(product.NUM_ARGS, product.NUM_ROWS, layer, rows)

    def prepare_group(self, rows: torch.Tensor, most: int, out: torch.Tensor) -> Prepared:
        assert rows.is_contiguous(), "rows must follow each other"
        # More flat rows than these need packing, which depends on their number.
        at_once = min(most, amx.MAX_ROWS) if self._has_amx else most
        scratch = self.prepare(FlatRows(rows[:at_once]), FlatRows(out[:at_once]), None)
        # Features that fill up the last panel are zeros.
        self.args[product.SIZE] = out.shape[1]
        steps = rows.shape[1] * rows.itemsize, out.shape[1] * out.itemsize, 0
        return Prepared(steps, (scratch,), at_once)

    def _multiply(
        self,
        rows: FlatRows | PackedRows,
        out: FlatRows | PackedRows,
        summand: FlatRows | PackedRows | None,
        delta: torch.Tensor | None = None,
    ) -> None:
        if rows.num_rows == 0:
            return
        scratch, kernel = self.prepare(rows, out, summand), self.kernel
        if delta is not None:
            kernel, gate = self._kernel_with_delta(), 4 * (delta.shape[1] - self.num_panels * PANEL)
            self.args[product.DELTA :] = delta.data_ptr() + gate, 4 * delta.shape[1], gate
        self.thread_pool.run(kernel, self._args_address, self.num_parts)
        del scratch

    def prepare(
        self, rows: FlatRows | PackedRows, out: FlatRows | PackedRows, summand: FlatRows | PackedRows | None
    ) -> torch.Tensor:
        """Sets ``args`` for some rows; returns the memory in them that threads work in."""
        num_rows = rows.num_rows
        rows_at_once, row_bytes = num_rows, 4 if self._has_float_rows else 2
        if self._has_float_rows:
            rows_at_once = min(num_rows, _FLOAT_ROWS_AT_ONCE)
        elif num_rows > amx.MAX_ROWS and self._has_amx:
            rows_at_once = min(-(-num_rows // HEIGHT) * HEIGHT, MAX_ROWS_AT_ONCE)
        num_bytes = rows_at_once * rows.num_features * row_bytes
        has_ranges = self._has_amx or self._has_float_rows
        num_ranges = -(-num_bytes // MAX_BYTES_AT_ONCE) if has_ranges else 1
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
        scratch = self.thread_pool.empty(self.thread_pool.size * scratch_size, torch.uint8)
        args, item_size = self.args, self.weight.itemsize
        args[: product.NUM_SUMS + 1] = (
            *(rows.address, item_size * rows.row_step, item_size * rows.block_step, num_rows, rows_at_once),
            *(out.address, out.row_step, out.block_step, out.data.dtype == torch.float32),
            0 if summand is None else summand.address,
            *(scratch.data_ptr(), scratch_size),
            self.size if is_whole else _MAX_PANELS_AT_ONCE,
            blocks_at_once,
            sums_size,
            num_sums,
        )
        args[product.SIZE], args[product.FLOAT_ROWS] = self.size, all_sums_size
        return scratch


class TiledLinear:
    """Computes ``x @ weight.T + bias`` for rows of the weight's type; implements ``linear.Linear``."""

    __slots__ = (
        "_plus", "bias", "has_whole_blocks", "in_features", "num_bytes", "num_weights", "product", "weight",
    )  # fmt: skip

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, thread_pool: ThreadPool) -> None:
        size, self.in_features = weight.shape
        self.has_whole_blocks = self.in_features % BLOCK == 0
        self.num_weights, self.num_bytes = weight.numel(), weight.nbytes
        self.weight = _panels(weight)
        self.bias = padded_bias(bias, size)
        self.product = TiledProduct(self.weight, self.bias, size, PLAIN, thread_pool)
        self._plus = TiledProduct(self.weight, self.bias, size, PLUS, thread_pool)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def thread_pool(self) -> ThreadPool:
        return self.product.thread_pool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product.run(rows, self.weight.dtype)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product.run(rows, torch.float32)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._plus.run(rows, self.weight.dtype, summand)

    def changed(
        self, rows: torch.Tensor, delta: torch.Tensor, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer, with its sums changed by what :meth:`TiledProduct.run` calls a delta."""
        product = self.product if summand is None else self._plus
        return product.run(rows, self.weight.dtype, summand, delta)

    def packed(self, rows: PackedRows) -> PackedRows:
        """The layer on packed rows, as the methods below; needs AMX and whole panels of output features."""
        return self.product.run_packed(rows)

    def packed_precise(self, rows: PackedRows) -> torch.Tensor:
        """The layer with flat float32 output ``[num_rows, out_features]``, not rounded."""
        return self.product.run_unpacked(rows, torch.float32)

    def packed_plus(self, rows: PackedRows, summand: PackedRows) -> PackedRows:
        return self._plus.run_packed(rows, summand)


class TiledGate:
    """Computes a gate and up, joined, for rows of the weights' type; implements ``linear.Gate``."""

    __slots__ = ("bias", "has_whole_blocks", "in_features", "num_bytes", "num_weights", "product", "weight")

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        thread_pool: ThreadPool,
        joint: Joint = Activation.SILU,
    ) -> None:
        self.in_features = gate.shape[1]
        self.has_whole_blocks = self.in_features % BLOCK == 0
        self.num_weights, self.num_bytes = 2 * gate.numel(), 2 * gate.nbytes
        # A gate panel, then the up panel of the same features.
        self.weight = _panels(gate, up)
        self.bias = torch.stack([padded_bias(bias, len(gate)) for bias in (gate_bias, up_bias)], dim=1)
        self.product = TiledProduct(self.weight, self.bias, gate.shape[0], GATED, thread_pool, joint)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def thread_pool(self) -> ThreadPool:
        return self.product.thread_pool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product.run(rows, self.weight.dtype)

    def changed(self, rows: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return self.product.run(rows, self.weight.dtype, delta=delta)

    def packed(self, rows: PackedRows) -> PackedRows:
        """The layer on packed rows; needs AMX."""
        return self.product.run_packed(rows)
