"""Memory on large pages, for weights that stream through once a forward."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

LARGE_PAGE = 2 << 20
"""Bytes, of Linux on x86-64; elsewhere only a size to round up to."""


def on_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor, on large pages where the system has them and it is large enough for one.

    With pages of 4 KiB a core that streams weights waits a tenth of its time for page tables.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, -(-size // LARGE_PAGE) * LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
