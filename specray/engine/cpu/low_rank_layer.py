"""What adapters add to one linear layer, as compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from specray.engine.cpu import low_rank
from specray.engine.cpu.low_rank import PANEL, TILE, WIDTH
from specray.engine.cpu.thread_pool import APART, ThreadPool

_PARTS_PER_THREAD = 2
_MIN_SHARED_WEIGHTS = 65_536
"""Weights of all adapters of a step from which on a second thread pays off."""


class KernelLowRank:
    """The low-rank products of one linear layer with each slot's adapter.

    Args:
        sizes: output features; of a gated pair those of the gate, and of up.
        num_slots: most adapters at a time.
        max_rank: most ranks of an adapter here.
        dtype: of rows and weights, bfloat16 or float32.
    """

    def __init__(
        self,
        in_features: int,
        sizes: tuple[int, ...],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        thread_pool: ThreadPool,
    ) -> None:
        self._in_features, self._num_panels = in_features, sum(-(-size // PANEL) for size in sizes)
        self._num_slots, self._thread_pool, self._dtype = num_slots, thread_pool, dtype
        self._turned_step = -(-max_rank // WIDTH) * WIDTH
        name = str(dtype).removeprefix("torch.")
        self._down, self._up = low_rank.down_kernel(name), low_rank.up_kernel(name)
        self._table = np.zeros((num_slots, low_rank.NUM_COLUMNS), dtype=np.int64)
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self._args = np.zeros(low_rank.NUM_ARGS, dtype=np.int64)
        self._args[[low_rank.TABLE, low_rank.IN_FEATURES, low_rank.NUM_PANELS, low_rank.TURNED_STEP]] = (
            *(self._table.ctypes.data, in_features),
            *(self._num_panels, self._turned_step),
        )

    def pack(self, down: torch.Tensor, ups: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """``[rank, in_features]``, and ``[out_features, rank]`` of each size, as :meth:`put` takes them."""
        rank = down.shape[0]
        assert rank <= self._turned_step, (rank, self._turned_step)
        padded = F.pad(down, (0, 0, 0, -rank % WIDTH)).view(-1, WIDTH, self._in_features)
        packed = padded.permute(0, 2, 1).to(self._dtype).contiguous()
        up, ranges = _packed_ups(ups, self._dtype)
        assert len(ranges) == self._num_panels, (len(ranges), self._num_panels)
        return packed, up, ranges

    def put(self, slot: int, packed: tuple[torch.Tensor, ...]) -> None:
        """Gives a slot an adapter."""
        down, up, ranges = self._kept[slot] = packed
        self._table[slot] = down.data_ptr(), len(down), up.data_ptr(), ranges.data_ptr()

    def clear(self, slot: int) -> None:
        """The slot has nothing to add here."""
        self._table[slot] = 0
        self._kept.pop(slot, None)

    def __call__(self, rows: torch.Tensor, segments: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """What is added to the sums of contiguous rows, float32 ``[num_rows, 32 * panels]``. Not thread-safe.

        Args:
            segments, order: see ``low_rank``; recorded calls read them where they are now.
        """
        assert rows.is_contiguous() and rows.dtype == self._dtype, "rows follow each other"
        pool, args, num_rows = self._thread_pool, self._args, len(rows)
        step = self._num_panels * PANEL
        # Some more: of parts that end within a panel, whole panels are read.
        out = pool.empty(num_rows * step + PANEL, torch.float32)
        turned = pool.empty((num_rows + 1, self._turned_step), torch.float32)
        scratch_size = TILE * 4 * self._in_features + APART
        scratch = pool.empty(pool.size * scratch_size, torch.uint8)
        args[[low_rank.ROWS, low_rank.STRIDE, low_rank.SEGMENTS, low_rank.ORDER, low_rank.TURNED]] = (
            *(rows.data_ptr(), self._in_features * rows.itemsize),
            *(segments.data_ptr(), order.data_ptr(), turned.data_ptr()),
        )
        args[[low_rank.SCRATCH, low_rank.SCRATCH_SIZE, low_rank.OUT, low_rank.OUT_STEP]] = (
            *(scratch.data_ptr(), scratch_size),
            *(out.data_ptr(), step),
        )
        num_adapters = min(self._num_slots, num_rows)
        for kernel, size in ((self._down, self._in_features), (self._up, step)):
            is_shared = num_adapters * self._turned_step * size >= _MIN_SHARED_WEIGHTS
            num_parts = _PARTS_PER_THREAD * pool.size if is_shared and pool.size > 1 else 1
            pool.run(kernel, args.ctypes.data, num_parts)
        return out[:-PANEL].view(num_rows, step)


def _packed_ups(ups: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Panels with those of their ranks that are not zero in all of them, one after the other; the ranges."""
    rank = ups[0].shape[1]
    panels = torch.cat([F.pad(up, (0, 0, 0, -len(up) % PANEL)).view(-1, PANEL, rank) for up in ups])
    is_used = (panels != 0).any(1)
    firsts = is_used.int().argmax(1)
    ends = torch.where(is_used.any(1), rank - is_used.int().flip(1).argmax(1), firsts)
    pieces, ranges, begin, offset = [], [], 0, 0
    bounds = torch.stack((firsts, ends), dim=1)
    changes = (bounds[1:] != bounds[:-1]).any(1).nonzero().flatten() + 1
    for stop in [*changes.tolist(), len(panels)]:
        first, end = bounds[begin].tolist()
        pieces.append(panels[begin:stop, :, first:end].permute(0, 2, 1).reshape(-1))
        size = (end - first) * PANEL
        ranges += [[offset + index * size, first, end - first] for index in range(stop - begin)]
        begin, offset = stop, offset + (stop - begin) * size
    return torch.cat(pieces).to(dtype), torch.tensor(ranges, dtype=torch.int64)
