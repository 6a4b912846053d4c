"""Rows of drafters that know no draft token before the one they draw: those of a sequence share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specray.engine.features.base import Continued


class SharedRows:
    """Whose the rows of the last step are, and how far all have gone."""

    def __init__(self) -> None:
        self._owners: list[int] = []
        self.depth = 0
        """Draft tokens that are drawn, of each path."""

    def begin(self, num_sequences: int) -> None:
        """The first step: a row for each sequence."""
        self._owners, self.depth = list(range(num_sequences)), 0

    def advance(self, continued: Sequence[Continued]) -> list[int]:
        """The next step; the places in the first one of the sequences that go on."""
        own = [self._owners[each.sources[0]] for each in continued]
        self._owners = [owner for owner, each in zip(own, continued, strict=True) for _ in each.sources]
        self.depth += 1
        return own


def for_each_row(logits: torch.Tensor, continued: Sequence[Continued]) -> torch.Tensor:
    """Logits of each row, of those of each sequence."""
    counts = [len(each.sources) for each in continued]
    if sum(counts) == len(counts):
        return logits
    return logits.repeat_interleave(torch.tensor(counts, device=logits.device), 0)
