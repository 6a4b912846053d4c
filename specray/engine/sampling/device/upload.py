"""The numbers of one step on their way to the device: gathered on the host, sent in one copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class UploadPiece(NamedTuple):
    """The place of one array among those sent."""

    start: int
    shape: tuple[int, ...]
    is_float: bool

    @property
    def size(self) -> int:
        """Number of its 64-bit words."""
        return int(np.prod(self.shape, dtype=np.int64))


class Sent:
    """What has arrived: views of one tensor.

    Args:
        words: int64, all pieces one after the other.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words

    def __getitem__(self, piece: UploadPiece) -> Tensor:
        words = self._words[piece.start : piece.start + piece.size]
        return (words.view(torch.float64) if piece.is_float else words).view(piece.shape)


class Upload:
    """Gathers arrays of 64-bit numbers for one copy."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int64]] = []
        self._size = 0

    def add(self, values: NDArray[Any]) -> UploadPiece:
        """Takes an array, int64 or float64; other integers and truth values become int64."""
        is_float = values.dtype == np.float64
        assert is_float or values.dtype.kind in "iub", values.dtype
        whole = np.ascontiguousarray(values, dtype=np.float64 if is_float else np.int64)
        piece = UploadPiece(self._size, values.shape, bool(is_float))
        self._parts.append(whole.reshape(-1).view(np.int64))
        self._size += piece.size
        return piece

    def send(self, device: torch.device) -> Sent:
        """Copies everything; does not wait for the device."""
        # From pinned memory the copy overlaps the host; torch keeps such memory until it is done.
        is_pinned = device.type == "cuda" and torch.cuda.is_available()
        host = torch.empty(self._size, dtype=torch.int64, pin_memory=is_pinned)
        if self._parts:
            np.concatenate(self._parts, out=host.numpy())
        return Sent(host.to(device, non_blocking=True))
