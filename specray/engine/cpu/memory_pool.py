"""Memory pool for the tensors of CPU graphs, which run one at a time and so can share the same memory.

A forward's tensors live for a few kernels, and memory that was just written is still cached. A recording that
gave every tensor its own memory would write to cold memory layer after layer, and a hundred recordings would
hold a hundred copies.
"""

from __future__ import annotations

import math
import weakref
from functools import partial

import torch

from specray.engine.cpu.huge_pages import empty_on_huge_pages

_ALIGNMENT = 64
"""Bytes of a cache line."""
_FIRST_CHUNK = 2 << 20


class MemoryPool:
    """Hands out tensors; memory of tensors freed during a recording is reused later in it."""

    def __init__(self) -> None:
        # Ever larger ones: new recordings use the last, older ones stay for the recordings that use them.
        self._chunks: list[torch.Tensor] = []
        self._end = 0
        self._free: dict[int, list[tuple[int, int]]] = {}
        """Free pieces (chunk, offset) by size in bytes, the most recently used last."""

    def begin(self) -> None:
        """Starts a recording, which may overwrite the tensors of earlier ones."""
        self._end = 0
        self._free = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised tensor, in the memory of a freed one of the same size if there is one."""
        num_items = shape if isinstance(shape, int) else math.prod(shape)
        size = -(-num_items * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        free = self._free.setdefault(size, [])
        chunk, offset = free.pop() if free else self._new_place(size)
        piece = self._chunks[chunk].numpy()[offset : offset + size]
        # Torch releases the piece with the tensor's last view.
        weakref.finalize(piece, partial(free.append, (chunk, offset))).atexit = False
        return torch.frombuffer(piece, dtype=dtype, count=num_items).view(shape)

    def _new_place(self, size: int) -> tuple[int, int]:
        if not self._chunks or self._end + size > len(self._chunks[-1]):
            last = len(self._chunks[-1]) if self._chunks else _FIRST_CHUNK // 2
            self._chunks.append(empty_on_huge_pages((max(2 * last, size),), torch.uint8))
            self._end = 0
        offset, self._end = self._end, self._end + size
        return len(self._chunks) - 1, offset
