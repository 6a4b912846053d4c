"""Linear layers with quantised weights on CPU: products of integer rows, and epilogues as elsewhere.

A part of a job is some panels. One row is bound by reading the weights, which a layer reads once per step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from specray.engine.activation import Activation, Joint, joint_name
from specray.engine.cpu.experts.grouped import ArgPlaces, Prepared
from specray.engine.cpu.gemm.epilogue import GATED, PLAIN, PLUS, epilogue_kernel
from specray.engine.cpu.gemm.linear import MIN_SHARED_WEIGHTS, PARTS_PER_THREAD, padded_bias
from specray.engine.cpu.gemm.quantized.integer_rows import BLOCK_BYTES, FACTOR_BYTES, integer_rows
from specray.engine.cpu.gemm.quantized.layout import Layout
from specray.engine.cpu.gemm.quantized.multiply import make_multiply
from specray.engine.cpu.gemm.quantized.panels import Packable, Panels, pack
from specray.engine.cpu.gemm.quantized.tile import Registers, fastest_registers
from specray.engine.cpu.gemm.rows import HEIGHT
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer, beside_kernel
from specray.engine.weights.quantized_weight import QuantizedWeight
from specray.engine.weights.stored_weight import StoredWeight

_ROWS_AT_ONCE = 384
"""Integer rows whose sums a thread holds at once, in L2; a multiple of a tile, and of two."""

(
    _INTEGERS,
    _FACTORS,
    _NUM_ROWS,
    _OUT,
    _IS_FLOAT,
    _SUMMAND,
    _SCRATCH,
    _SCRATCH_SIZE,
    _ROWS_EACH,
    _GATE,
    _WEIGHT,
    _BIAS,
    _NUM_GROUPS,
    _SIZE,
    _STEP,
    _KIND,
    _ALL_ROWS,
    _DELTA,
    _DELTA_STEP,
    _GATE_DELTA,
) = range(20)
_NUM_ARGS = 20


def has_kernels() -> bool:
    """Whether this processor runs the kernels: any with AVX2, and with conversions from float16."""
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx2", "fma", "f16c"))


class _Job:
    """Some output features of a layer: a kernel, and those of its arguments that do not change between calls.

    Args:
        weight: in panels.
        gate: the gate's weight, for a layer that is one.
        bias: float32 ``[panels, 32]``; of a gate ``[panels, 2, 32]``.
        first: output feature of the layer with which they begin, of ``step``.
    """

    def __init__(
        self,
        weight: Panels,
        bias: torch.Tensor,
        kind: int,
        *,
        gate: Panels | None = None,
        joint: Joint = Activation.SILU,
        first: int = 0,
        step: int | None = None,
    ) -> None:
        self.first, self.num_panels, self.num_weights = (
            first,
            len(weight.data),
            weight.size * weight.in_features,
        )
        self._kept = weight, gate, bias
        self.kernel_of = functools.partial(
            _linear_kernel, (gate or weight).layout, weight.layout, joint, fastest_registers()
        )
        """The kernel, without and with what is added to sums."""
        self.kernel = self.kernel_of(False)
        self.args = np.zeros(_NUM_ARGS, dtype=np.int64)
        self.args[[_WEIGHT, _BIAS]] = weight.data.data_ptr(), bias.data_ptr()
        self.args[_GATE] = 0 if gate is None else gate.data.data_ptr()
        self.args[[_NUM_GROUPS, _SIZE, _STEP, _KIND]] = (
            *(weight.num_groups, weight.size),
            *(step or weight.size, kind),
        )


class _Layer:
    """Jobs that write side by side to one output, from the same integer rows."""

    __slots__ = ("_args", "_dtype", "_jobs", "_kernel", "_num_layers", "_num_parts", "_size", "thread_pool")

    def __init__(self, jobs: Sequence[_Job], kind: int, thread_pool: ThreadPool, dtype: torch.dtype) -> None:
        self._jobs, self.thread_pool, self._dtype = jobs, thread_pool, dtype
        self._num_layers = 2 if kind == GATED else 1
        self._size = int(jobs[0].args[_STEP])
        self._num_parts = _num_parts(jobs, self._num_layers, thread_pool.size)
        if len(jobs) == 1:
            self._kernel = jobs[0].kernel
            self._args = jobs[0].args[None]
        else:
            self._kernel = beside_kernel(len(jobs), _NUM_ARGS)
            heads = [[job.kernel.address, parts] for job, parts in zip(jobs, self._num_parts, strict=True)]
            self._args = np.concatenate([np.array(heads), [job.args for job in jobs]], 1)

    def run(
        self,
        rows: torch.Tensor,
        dtype: torch.dtype,
        summand: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiplies rows, bfloat16 or float32; a summand has the output's type. Not thread-safe.

        Args:
            delta: see ``gemm.linear.TiledProduct.run``.
        """
        assert summand is None or (summand.is_contiguous() and summand.dtype == dtype), "as the output"
        if len(rows) == 0:
            return self.thread_pool.empty((0, self._size), dtype)
        out = self.thread_pool.empty((len(rows), self._size), dtype)
        kept, _ = self._prepare(rows, out, summand)
        for job, own in zip(self._jobs[1:], self._args[1:, -_NUM_ARGS:], strict=True):
            own[_OUT] += job.first * dtype.itemsize
            own[_SUMMAND] += job.first * dtype.itemsize
        kernel = self._kernel if delta is None else self._add(delta)
        self.thread_pool.run(kernel, self._args.ctypes.data, sum(self._num_parts))
        if delta is not None and len(self._jobs) > 1:
            self._args[:, 0] = [job.kernel.address for job in self._jobs]
        del kept
        return out

    def _add(self, delta: torch.Tensor) -> Kernel:
        """Sets what is added to sums in the arguments; returns the kernel that adds it."""
        kernels = [job.kernel_of(True) for job in self._jobs]
        gate = 4 * (delta.shape[1] // self._num_layers) * (self._num_layers - 1)
        for job, own in zip(self._jobs, self._args[:, -_NUM_ARGS:], strict=True):
            own[_DELTA:] = delta.data_ptr() + 4 * job.first + gate, 4 * delta.shape[1], gate
        if len(kernels) == 1:
            return kernels[0]
        self._args[:, 0] = [kernel.address for kernel in kernels]
        return self._kernel

    def _prepare(
        self, rows: torch.Tensor, out: torch.Tensor, summand: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """Sets the arguments for some rows; gives memory to keep, and integer rows of each row."""
        assert rows.is_contiguous(), "rows must follow each other"
        integers = integer_rows(rows, self.thread_pool)
        scratch_size = min(integers.num_rows, _ROWS_AT_ONCE) * self._num_layers * PANEL * 4 + APART
        scratch = self.thread_pool.empty(self.thread_pool.size * scratch_size, torch.uint8)
        addresses = out.data_ptr(), out.dtype == torch.float32, 0 if summand is None else summand.data_ptr()
        args, each = self._args[:, -_NUM_ARGS:], integers.num_rows // len(rows)
        args[:, : _ROWS_EACH + 1] = (
            *(integers.integers.data_ptr(), integers.factors.data_ptr(), integers.num_rows),
            *(*addresses, scratch.data_ptr(), scratch_size, each),
        )
        args[:, _ALL_ROWS] = integers.num_rows
        if self.is_groupable:
            args[0, [_SIZE, _STEP]] = self._size
        return (integers.integers, integers.factors, scratch), each

    @property
    def is_groupable(self) -> bool:
        """Whether one kernel multiplies the whole layer: see ``experts.grouped.GroupableLayer``."""
        return len(self._jobs) == 1

    @property
    def places(self) -> ArgPlaces:
        layer, rows = (_WEIGHT, _BIAS, _GATE), (_INTEGERS, _FACTORS, _OUT)
        return ArgPlaces(_NUM_ARGS, _NUM_ROWS, layer, rows)

    @property
    def kernel(self) -> Kernel:
        return self._jobs[0].kernel

    @property
    def args(self) -> NDArray[np.int64]:
        args: NDArray[np.int64] = self._args[0]
        return args

    @property
    def num_panels(self) -> int:
        return self._jobs[0].num_panels

    @property
    def num_weights(self) -> int:
        return self._jobs[0].num_weights * self._num_layers

    def prepare_group(self, rows: torch.Tensor, most: int, out: torch.Tensor) -> Prepared:
        kept, each = self._prepare(rows, out, None)
        # Features that fill up the last panel are zeros.
        self._args[0, [_SIZE, _STEP]] = out.shape[1]
        steps = each * BLOCK_BYTES, each * FACTOR_BYTES, out.shape[1] * out.itemsize
        return Prepared(steps, kept, most, each)


def _num_parts(jobs: Sequence[_Job], num_layers: int, num_threads: int) -> list[int]:
    """Parts of each job: as many as its share of the weights."""
    total = sum(job.num_weights for job in jobs) * num_layers
    if total < MIN_SHARED_WEIGHTS:
        return [1] * len(jobs)
    wanted = PARTS_PER_THREAD * num_threads
    return [min(job.num_panels, max(1, round(wanted * num_layers * job.num_weights / total))) for job in jobs]


class QuantizedLinear:
    """Computes ``x @ weight.T + bias``; implements ``linear.Linear``.

    Args:
        weight: quantised, or as a file stores it: parts in layouts of their own.
    """

    __slots__ = ("_plus", "dtype", "in_features", "num_bytes", "num_weights", "panels", "plain")

    def __init__(
        self,
        weight: QuantizedWeight | StoredWeight,
        bias: torch.Tensor | None,
        thread_pool: ThreadPool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.dtype = dtype
        parts = weight.parts if isinstance(weight, StoredWeight) else (weight,)
        self.panels = tuple(pack(part, thread_pool) for part in parts)
        sizes = [part.size for part in self.panels]
        self.in_features = self.panels[0].in_features
        self.num_weights = sum(sizes) * self.in_features
        self.num_bytes = sum(part.data.nbytes for part in self.panels)
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        padded = [padded_bias(part, size) for part, size in zip(biases, sizes, strict=True)]
        firsts = accumulate(sizes, initial=0)
        places = list(zip(self.panels, padded, firsts, strict=False))
        self.plain, self._plus = (
            _Layer(
                [_Job(part, numbers, kind, first=first, step=sum(sizes)) for part, numbers, first in places],
                kind,
                thread_pool,
                dtype,
            )
            for kind in (PLAIN, PLUS)
        )

    @property
    def thread_pool(self) -> ThreadPool:
        return self.plain.thread_pool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.plain.run(rows, self.dtype)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self.plain.run(rows, torch.float32)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._plus.run(rows, self.dtype, summand)

    def changed(
        self, rows: torch.Tensor, delta: torch.Tensor, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        layer = self.plain if summand is None else self._plus
        return layer.run(rows, self.dtype, summand, delta)


class QuantizedGate:
    """Computes a gate and up, joined; implements ``linear.Gate``. A stored weight has one part."""

    __slots__ = ("dtype", "gated", "in_features", "num_bytes", "num_weights", "panels")

    def __init__(
        self,
        gate: Packable,
        up: Packable,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        thread_pool: ThreadPool,
        dtype: torch.dtype = torch.bfloat16,
        joint: Joint = Activation.SILU,
    ) -> None:
        self.dtype = dtype
        self.panels = pack(gate, thread_pool), pack(up, thread_pool)
        gate_panels, panels = self.panels
        self.in_features, size = panels.in_features, panels.size
        self.num_weights = 2 * size * self.in_features
        self.num_bytes = gate_panels.data.nbytes + panels.data.nbytes
        bias = torch.stack([padded_bias(bias, size) for bias in (gate_bias, up_bias)], dim=1)
        job = _Job(panels, bias, GATED, gate=gate_panels, joint=joint)
        self.gated = _Layer([job], GATED, thread_pool, dtype)

    @property
    def thread_pool(self) -> ThreadPool:
        return self.gated.thread_pool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.gated.run(rows, self.dtype)

    def changed(self, rows: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return self.gated.run(rows, self.dtype, delta=delta)


@functools.cache
def _linear_kernel(
    gate: Layout, weight: Layout, joint: Joint, registers: Registers, has_delta: bool
) -> Kernel:
    """A kernel of layers, and of gates in these layouts; a layer has its own as that of the gate."""
    names = [weight.name] if gate == weight else [gate.name, weight.name]
    names += [] if joint is Activation.SILU else [joint_name(joint)]
    names += ["delta"] * has_delta
    make = functools.partial(_make_linear, gate, weight, joint, registers, has_delta)
    return Kernel("-".join(("linear", registers.name, *names)), _NUM_ARGS, make)


def _make_linear(
    gate_layout: Layout, layout: Layout, joint: Joint, registers: Registers, has_delta: bool
) -> Any:
    finish, multiply = epilogue_kernel(joint, has_delta=has_delta), make_multiply(layout, registers)
    multiply_gate = multiply if gate_layout == layout else make_multiply(gate_layout, registers)
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
        kind, is_float, size, step = args[_KIND], args[_IS_FLOAT], args[_SIZE], args[_STEP]
        at = first_row * step + panel * PANEL
        bias = args[_BIAS] + panel * PANEL * 4
        if kind == GATED:
            bias += (panel + 1) * PANEL * 4
        item = 4 if is_float else 2
        out, summand = args[_OUT] + at * item, args[_SUMMAND] + at * item
        shape = (num_rows, min(PANEL, size - panel * PANEL))
        delta = args[_DELTA] + first_row * args[_DELTA_STEP] + panel * PANEL * 4
        deltas = delta, args[_DELTA_STEP], args[_GATE_DELTA]
        return kind, is_float, sums, bias, out, summand, gate, (step, HEIGHT * step), deltas, shape

    def linear(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_groups, each = args[_NUM_ROWS], args[_NUM_GROUPS], args[_ROWS_EACH]
        all_rows = args[_ALL_ROWS]
        num_panels = (args[_SIZE] + PANEL - 1) // PANEL
        sums = args[_SCRATCH] + thread * args[_SCRATCH_SIZE]
        gate = min(num_rows, _ROWS_AT_ONCE) * PANEL * 4 if args[_KIND] == GATED else 0
        for panel in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            for first in range(0, num_rows, _ROWS_AT_ONCE):
                count = min(_ROWS_AT_ONCE, num_rows - first)
                integers = args[_INTEGERS] + first * BLOCK_BYTES
                factors = args[_FACTORS] + first * FACTOR_BYTES
                if gate:
                    multiply_gate(integers, factors, all_rows, args[_GATE], panel, sums, count, num_groups)
                multiply(integers, factors, all_rows, args[_WEIGHT], panel, sums + gate, count, num_groups)
                if each == 2:
                    merge(sums, count // 2)
                    if gate:
                        merge(sums + gate, count // 2)
                done = epilogue(args, sums + gate, panel, first // each, count // each, gate)
                finish(done, 0, count // each)

    return linear
