"""CPU graphs: a forward's kernels, recorded once per shape and replayed in one call, like CUDA graphs.

At one row a layer's kernels take less time than the Python between them. A graph holds copies of their
arguments; only the input and attention's arguments differ between replays.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from specray.engine.cpu.attention.kernel import AttentionCall
from specray.engine.cpu.memory_pool import MemoryPool
from specray.engine.cpu.thread_pool import Kernel, ThreadPool


class CpuGraph:
    """The recorded jobs of one forward; implements ``thread_pool.Recorder``.

    Args:
        attention: the kernel whose arguments change between replays.
        memory_pool: memory of the tensors that the jobs write; shared with graphs that run at other times.
    """

    def __init__(self, thread_pool: ThreadPool, attention: Kernel, memory_pool: MemoryPool) -> None:
        self._thread_pool = thread_pool
        self._attention = attention
        self._memory_pool = memory_pool
        memory_pool.begin()
        self._kernels: list[Kernel] = []
        self._args: list[np.ndarray] = []
        self._num_parts: list[int] = []

    def add(self, kernel: Kernel, args_address: int, num_parts: int) -> None:
        numbers = ctypes.string_at(args_address, 8 * kernel.num_args)
        self._kernels.append(kernel)
        self._args.append(np.frombuffer(numbers, dtype=np.int64).copy())
        self._num_parts.append(num_parts)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory_pool.empty(shape, dtype)

    def finish(self) -> None:
        """Ends the recording."""
        is_attention = [kernel is self._attention for kernel in self._kernels]
        self._attention_rows = np.flatnonzero(is_attention)
        # One array, so that all layers change at once.
        self._attention_args = np.array([self._args[row] for row in self._attention_rows])
        for place, row in enumerate(self._attention_rows):
            self._args[row] = self._attention_args[place]
        jobs = zip(self._kernels, self._args, self._num_parts, strict=True)
        self._jobs = np.array(
            [(kernel.address, args.ctypes.data, parts) for kernel, args, parts in jobs], dtype=np.int64
        )
        self._jobs_address = self._jobs.ctypes.data

    def run(self, attention: AttentionCall) -> None:
        """Replays all jobs on what the input tensor now holds. Not thread-safe."""
        self._jobs[self._attention_rows, 2] = attention.retarget(self._attention_args)
        self.run_again()

    def run_again(self) -> None:
        """Replays all jobs with the last arguments of attention, if there is any."""
        self._thread_pool.run_all(self._jobs_address, len(self._jobs))
