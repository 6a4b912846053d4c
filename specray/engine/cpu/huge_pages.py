"""Tensors on huge pages, for weights that are streamed once per forward."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64 Linux; elsewhere only a size to round up to."""
_RUN = 16 * HUGE_PAGE
"""Bytes of a mapping that tensors of up to half as many share, one after the other."""
_LINE = 64


class _Run:
    """Memory that is given away from its beginning to its end; tensors own it."""

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        # A mapping of some huge pages need not begin with one.
        self._memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel built without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        first = -whole.data_ptr() % HUGE_PAGE
        self._bytes, self._used = whole[first : first + size], 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Some bytes, from the next cache line on; None: there are not as many."""
        first = -(-self._used // _LINE) * _LINE
        if first + num_bytes > len(self._bytes):
            return None
        self._used = first + num_bytes
        return self._bytes[first : self._used]


_lock = threading.Lock()
_shared: list[_Run] = []
"""The mapping that small tensors are taken from, once there is one."""


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialised tensor, on huge pages if the system has them.

    With pages of 4 KiB a core that streams weights spends a tenth of its time on page-table walks. Weights
    of experts are smaller than a huge page: those made one after the other share some. Memory goes back when
    all tensors of a mapping are gone.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    found = _small(size) if size <= _RUN // 2 else _Run(size).take(size)
    assert found is not None, "a new mapping has room"
    return found.view(dtype).view(shape)


def _small(size: int) -> torch.Tensor:
    with _lock:
        found = _shared[0].take(size) if _shared else None
        if found is None:
            _shared[:] = [_Run(_RUN)]
            found = _shared[0].take(size)
    assert found is not None, "it is at most half of a mapping"
    return found
