"""Which adapter each row of a step has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.step import Slots

MAX_FIXED_ROWS = 512
"""Rows up to which a plan has its place, for captured forwards, which read it there."""


class RowPlan:
    """The adapters of some rows, as kernels read them. Adapters are *slots*; -1: a row has none.

    Args:
        num_slots: most adapters at a time.
        device: of ``slots``.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.num_rows = 0
        self.segments = torch.zeros(1 + 3 * (num_slots + 1), dtype=torch.int64)
        """int64 on the host: the number of segments, then slot, first place and count of each."""
        self._fixed_order = torch.zeros(MAX_FIXED_ROWS, dtype=torch.int64)
        self._fixed_slots = torch.full((MAX_FIXED_ROWS,), -1, dtype=torch.int64, device=device)
        self.order = self._fixed_order
        """The row of each place, int64 on the host: those of a segment follow each other."""
        self.slots = self._fixed_slots
        """The slot of each row, int64 on the device; behind the last row -1."""

    def fill(self, slots: NDArray[np.int64]) -> None:
        self.num_rows = num_rows = len(slots)
        order = np.argsort(slots, kind="stable")
        found, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
        self.segments[0] = len(found)
        segments = np.stack((found, firsts, counts), axis=1).ravel()
        self.segments[1 : 1 + len(segments)] = torch.from_numpy(segments)
        is_fixed = num_rows <= MAX_FIXED_ROWS
        self.order = self._fixed_order if is_fixed else torch.empty(num_rows, dtype=torch.int64)
        self.order[:num_rows] = torch.from_numpy(order)
        if self._device.type == "cpu" or not is_fixed:
            self.slots = self._fixed_slots if is_fixed else torch.empty(num_rows, dtype=torch.int64)
            self.slots[:num_rows] = torch.from_numpy(slots)
            self.slots[num_rows:] = -1
            self.slots = self.slots.to(self._device)
            return
        self.slots = self._fixed_slots
        padded = np.full(MAX_FIXED_ROWS, -1, dtype=np.int64)
        padded[:num_rows] = slots
        self.slots.copy_(torch.from_numpy(padded))

    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """The slots in use, each with its rows, int64 on the device."""
        segments = self.segments[1 : 1 + 3 * int(self.segments[0])].view(-1, 3).tolist()
        order = self.order.to(self._device)
        return [(slot, order[first : first + count]) for slot, first, count in segments if slot >= 0]


class AdapterRows:
    """The adapters of a step's rows, and of those whose logits are wanted, which the last layer cuts out."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._whole, self._wanted = RowPlan(num_slots, device), RowPlan(num_slots, device)

    def begin(self, slots: Sequence[int], logit_rows: Slots | None) -> None:
        """A step begins.

        Args:
            slots: of each row.
            logit_rows: as in ``step.Step``.
        """
        numbers = np.array(slots, dtype=np.int64)
        self._whole.fill(numbers)
        if logit_rows is not None:
            index = logit_rows if isinstance(logit_rows, slice) else logit_rows.cpu().numpy()
            self._wanted.fill(numbers[index])

    def of(self, num_rows: int) -> RowPlan:
        """The plan of that many rows: all, or those whose logits are wanted, which are fewer."""
        return self._wanted if num_rows < self._whole.num_rows else self._whole
