"""Room for the tensors of recorded forwards, which run one at a time and so may all lie in the same place.

A forward's tensors live for a few kernels; memory that was just written is still in a core's caches. A
recording that gave every tensor memory of its own would write to cold memory throughout, layer after layer,
and a hundred recordings would hold it a hundred times.
"""

from __future__ import annotations

import math
import weakref
from functools import partial

import torch

from specray.engine.cpu.huge_pages import on_large_pages

_ALIGNMENT = 64
"""Bytes of a cache line."""
_FIRST_CHUNK = 2 << 20


class Arena:
    """Hands out tensors; what dies during a recording makes room for what comes later in it."""

    def __init__(self) -> None:
        # Larger and larger; new recordings use the last one, older ones stay for those that used them.
        self._chunks: list[torch.Tensor] = []
        self._end = 0
        self._free: dict[int, list[tuple[int, int]]] = {}
        """By size: (chunk, offset), the most recently used last."""

    def begin(self) -> None:
        """Starts a recording. Tensors of the one before hold nothing from now on."""
        self._end = 0
        self._free = {}

    @property
    def num_bytes(self) -> int:
        """Of all its memory."""
        return sum(len(chunk) for chunk in self._chunks)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, at the place of one of the same size that is no longer referred to."""
        num_items = shape if isinstance(shape, int) else math.prod(shape)
        size = -(-num_items * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        free = self._free.setdefault(size, [])
        chunk, offset = free.pop() if free else self._new_place(size)
        piece = self._chunks[chunk].numpy()[offset : offset + size]
        # Torch lets the piece go with the tensor and the last of its views.
        weakref.finalize(piece, partial(free.append, (chunk, offset))).atexit = False
        return torch.frombuffer(piece, dtype=dtype, count=num_items).view(shape)

    def _new_place(self, size: int) -> tuple[int, int]:
        if not self._chunks or self._end + size > len(self._chunks[-1]):
            last = len(self._chunks[-1]) if self._chunks else _FIRST_CHUNK // 2
            self._chunks.append(on_large_pages((max(2 * last, size),), torch.uint8))
            self._end = 0
        offset, self._end = self._end, self._end + size
        return len(self._chunks) - 1, offset
