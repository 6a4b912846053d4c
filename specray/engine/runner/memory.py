"""How much memory the block cache gets, and what is said where there is not enough."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from specray.config import EngineConfig
from specray.engine.runner.cuda_graphs import MAX_ROWS
from specray.errors import ConfigError

_CPU_CACHE_GIB = 4.0
_SAFE_SHARE = 0.92
"""Share of the free memory that is given away; the rest is for what the allocator cannot join again."""
_COPIES_OF_LOGITS = 4
"""Float32 copies of the largest captured step's logits: the graphs', and those that sampling makes."""
_GIB = 2**30


class Usage(NamedTuple):
    """Bytes of a device's memory."""

    free: int
    total: int
    own: int
    """Bytes that this process holds."""


class DrafterMemory(NamedTuple):
    """Memory of a drafter in the target's process."""

    weight_bytes: int = 0
    bytes_per_token: int = 0
    """Bytes of each token that the block cache holds."""
    step_bytes: int = 0
    """Bytes of the largest tensors of one of its steps."""


NO_DRAFTER = DrafterMemory()
"""No drafter."""


class DeviceMemory(Protocol):
    """What is known of a device's memory."""

    def usage(self) -> Usage:
        """Usage now, with nothing kept back that could be given."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes that some work takes at most, besides what is there before it."""
        ...


class CudaMemory:
    """Implements :class:`DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def usage(self) -> Usage:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return Usage(free, total, torch.cuda.memory_reserved(self._device))

    def peak_of(self, work: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def cache_bytes(
    config: EngineConfig,
    memory: DeviceMemory | None,
    vocab_size: int,
    peak_step: Callable[[], object],
    num_reserved_bytes: int = 0,
) -> int:
    """Bytes of the block cache: as configured, or what weights and one largest step leave.

    Args:
        memory: of the device; None: the CPU.
        peak_step: runs a step of ``max_num_batched_tokens`` rows; called for ``auto`` on a device only.
        num_reserved_bytes: that are to be left for others, for ``auto`` on a device only.
    """
    if config.cache_memory_gib != "auto":
        return int(config.cache_memory_gib * _GIB)
    if memory is None:
        return int(_CPU_CACHE_GIB * _GIB)
    with naming(lambda: f"max_num_batched_tokens is {config.max_num_batched_tokens}; lower it"):
        step = memory.peak_of(peak_step)
    free, total, own = memory.usage()
    # Engines that share a device must not take from each other what comes first.
    allowed = min(free, int(config.num_gpus * total) - own) if config.shares_gpu else free
    logits = _COPIES_OF_LOGITS * 4 * MAX_ROWS * vocab_size
    return max(0, int(_SAFE_SHARE * (allowed - step - logits - num_reserved_bytes)))


@contextlib.contextmanager
def naming(advice: Callable[[], str]) -> Iterator[None]:
    """Turns an out-of-memory error into one that names what to lower.

    Raises:
        ConfigError: torch found no memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the device has too little memory: {advice()} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
