"""Recurrent layers as compiled kernels on CPU. Importing it needs numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from specray.engine.cache.state_pool import StatePool, StateRows
from specray.engine.cpu import recurrence as fields
from specray.engine.cpu import short_convolution
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.layers.convolution import ShortConvolution
from specray.engine.model.layers.delta import GatedDelta
from specray.engine.model.layers.mixers.mamba import Mamba

if TYPE_CHECKING:
    from specray.engine.model.layers.mixer_lowering import PlainMixer

_PARTS_PER_THREAD = 4
"""Parts of a kernel over states per thread: few since each has heads of its own."""


def _run_settled(
    mixer: PlainMixer, projected: torch.Tensor, pool: StatePool, place: int, out: torch.Tensor
) -> None:
    """Computes prompts' rows, chunk by chunk, with torch."""
    for item in pool.rows:
        if item.settled > item.start:
            rows = slice(item.first_row, item.first_row + item.settled - item.start)
            settled = StateRows(item.slot, item.base, item.start, item.settled, item.settled, item.first_row)
            out[rows] = mixer.run(projected[rows], pool.layers[place], settled)


class KernelMixer:
    """Implements ``layers.delta.Mixer``; prompts' rows are torch's."""

    def __init__(self, mixer: GatedDelta | Mamba, dtype: torch.dtype, thread_pool: ThreadPool) -> None:
        self.shape = shape = mixer.shape
        self._mixer = mixer
        self._thread_pool = thread_pool
        self._norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._rule = fields.HeadRule(
            str(dtype).removeprefix("torch."),
            shape.key_dim,
            shape.value_dim,
            shape.gate_dim,
            shape.num_taps,
            shape.num_heads // shape.num_key_heads,
            isinstance(mixer, GatedDelta),
            isinstance(mixer, GatedDelta) and mixer.has_sigmoid,
            isinstance(mixer, GatedDelta) and mixer.least_log_decay is not None,
        )
        self._kernel = fields.recurrence_kernel(self._rule)
        self._args = np.zeros(fields.NUM_ARGS, dtype=np.int64)
        tensors = {fields.TAPS: mixer.taps, fields.RATES: mixer.decay_rates}
        numbers = {fields.GATE_SCALE: 1.0}
        if isinstance(mixer, Mamba):
            tensors |= {fields.CONV_BIAS: mixer.conv_bias, fields.BIAS: mixer.step_bias}
            tensors |= {fields.SKIPS: mixer.skips}
            numbers |= {fields.SCALE: mixer.step_scale, fields.GATE_SCALE: mixer.gate_scale}
            numbers |= dict(zip((fields.LEAST, fields.MOST), mixer.steps, strict=True))
            self._args[fields.GROUPS] = mixer.num_groups
            if mixer.norm is not None and mixer.norm.parallel is None:
                self._norm = FusedRMSNorm(mixer.norm.weight, mixer.norm.eps, thread_pool, dtype)
            elif mixer.norm is not None:
                norm = mixer.norm
                self._norm = lambda rows: norm(rows).to(dtype)
        else:
            tensors |= {fields.CONV_BIAS: torch.zeros(shape.num_channels), fields.BIAS: mixer.decay_bias}
            tensors |= {fields.WEIGHT: mixer.norm}
            numbers |= {fields.SCALE: mixer.rate_scale, fields.EPS: mixer.eps}
            numbers |= {fields.LEAST: mixer.least_log_decay or 0.0}
            self._args[fields.GROUPS] = shape.num_key_heads
        self._tensors = tensors
        for field, tensor in tensors.items():
            assert tensor.is_contiguous() and tensor.dtype == torch.float32, "kernels take float32"
            self._args[field] = tensor.data_ptr()
        for field, number in numbers.items():
            self._args.view(np.float32)[2 * field] = number
        self._args[fields.HEADS] = shape.num_heads
        self._args_address = self._args.ctypes.data
        self._scratch = torch.empty(0)

    @property
    def can_be_captured(self) -> bool:
        """A CPU's captures, which are of kernels alone, know this one."""
        return True

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        """Not thread-safe."""
        shape, layer, args = self.shape, pool.layers[place], self._args
        assert projected.is_contiguous(), "rows follow each other"
        size = shape.num_heads * shape.value_dim
        out = self._thread_pool.empty((len(projected), size), projected.dtype)
        _run_settled(self._mixer, projected, pool, place, out)
        scratch_size = fields.scratch_size(self._rule, pool.max_open)
        if not len(self._scratch):
            # Recorded kernels go on using it.
            self._scratch = torch.zeros(self._thread_pool.size * scratch_size)
        tensors = {
            fields.ROWS: projected,
            fields.OUT: out,
            fields.STATES: layer.states,
            fields.UPDATES: layer.updates,
            fields.DECAYS: layer.decays,
            fields.KEYS: layer.keys,
            fields.INPUTS: layer.inputs,
            fields.TABLE: pool.table,
        }
        for field, tensor in tensors.items():
            args[field] = tensor.data_ptr()
        args[fields.NUM_SEQUENCES], args[fields.MAX_OPEN] = len(pool.table), pool.max_open
        args[fields.SCRATCH], args[fields.SCRATCH_SIZE] = self._scratch.data_ptr(), scratch_size
        self._thread_pool.run(self._kernel, self._args_address, _num_parts(self._thread_pool))
        return out if self._norm is None else self._norm(out)


class KernelConvolution:
    """Implements ``layers.delta.Mixer``; prompts' rows are torch's."""

    def __init__(self, mixer: ShortConvolution, dtype: torch.dtype, thread_pool: ThreadPool) -> None:
        self.shape = shape = mixer.shape
        self._mixer = mixer
        self._thread_pool = thread_pool
        self._bias = torch.zeros(shape.num_channels) if mixer.bias is None else mixer.bias
        self._kernel = short_convolution.convolution_kernel(
            str(dtype).removeprefix("torch."), shape.num_taps, fields.lanes_of(shape.num_channels, 16)
        )
        self._args = np.zeros(short_convolution.NUM_ARGS, dtype=np.int64)

    @property
    def can_be_captured(self) -> bool:
        """A CPU's captures, which are of kernels alone, know this one."""
        return True

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        """Not thread-safe."""
        assert projected.is_contiguous(), "rows follow each other"
        out = self._thread_pool.empty((len(projected), self.shape.num_channels), projected.dtype)
        _run_settled(self._mixer, projected, pool, place, out)
        tensors = projected, out, self._mixer.taps, self._bias, pool.layers[place].inputs, pool.table
        # In the order of the kernel's arguments.
        self._args[:] = (
            *(tensor.data_ptr() for tensor in tensors),
            len(pool.table),
            self.shape.num_channels,
            pool.max_open,
        )
        self._thread_pool.run(self._kernel, self._args.ctypes.data, _num_parts(self._thread_pool))
        return out


def _num_parts(thread_pool: ThreadPool) -> int:
    return 1 if thread_pool.size == 1 else _PARTS_PER_THREAD * thread_pool.size
