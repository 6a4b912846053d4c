"""A forward's kernels, recorded once for a shape and run again in one call: what CUDA graphs are on a GPU.

At one row a layer's kernels are shorter than Python between them. A tape holds copies of their arguments;
only the input, and what attention reads, differ from run to run.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from specray.engine.cpu.attention.kernel import AttentionCall
from specray.engine.cpu.memory_pool import Arena
from specray.engine.cpu.thread_pool import Kernel, Team


class Tape:
    """Implements ``team.Recorder``: the jobs of one forward.

    Args:
        attention: the kernel whose arguments change from run to run.
        arena: where the tensors are that its jobs write; it may have other tapes, which run at other times.
    """

    def __init__(self, team: Team, attention: Kernel, arena: Arena) -> None:
        self._team = team
        self._attention = attention
        self._arena = arena
        arena.begin()
        self._kernels: list[Kernel] = []
        self._args: list[np.ndarray] = []
        self._num_parts: list[int] = []

    def add(self, kernel: Kernel, args_address: int, num_parts: int) -> None:
        """A job was done."""
        numbers = ctypes.string_at(args_address, 8 * kernel.num_args)
        self._kernels.append(kernel)
        self._args.append(np.frombuffer(numbers, dtype=np.int64).copy())
        self._num_parts.append(num_parts)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for jobs to write to, then and later."""
        return self._arena.empty(shape, dtype)

    def finish(self) -> None:
        """Ends the recording."""
        is_attention = [kernel is self._attention for kernel in self._kernels]
        self._attention_rows = np.flatnonzero(is_attention)
        # In one piece, so that all layers change at once.
        self._attention_args = np.array([self._args[row] for row in self._attention_rows])
        for place, row in enumerate(self._attention_rows):
            self._args[row] = self._attention_args[place]
        jobs = zip(self._kernels, self._args, self._num_parts, strict=True)
        self._jobs = np.array(
            [(kernel.address, args.ctypes.data, parts) for kernel, args, parts in jobs], dtype=np.int64
        )
        self._jobs_address = self._jobs.ctypes.data

    def run(self, attention: AttentionCall) -> None:
        """Does it all again, on what is in the input tensor now. Not for two threads at once."""
        self._jobs[self._attention_rows, 2] = attention.retarget(self._attention_args)
        self._team.run_all(self._jobs_address, len(self._jobs))
