"""Tensors on huge pages, for weights that are streamed once per forward."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64 Linux; elsewhere only a size to round up to."""


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialised tensor, on huge pages if the system has them and the tensor fills one.

    With pages of 4 KiB a core that streams weights spends a tenth of its time on page-table walks.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor owns the mapping.
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
