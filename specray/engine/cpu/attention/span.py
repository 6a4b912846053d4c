"""Rows of one sequence in a step, as input of the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specray.engine.runner.inputs import BranchRow


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence: ``num_rows`` from ``first_row`` on, the first at position ``start``."""

    start: int
    first_row: int
    num_rows: int
    runs: Sequence[tuple[int, int, int]]
    """Contiguous pieces of the sequence in the cache, in order: first position, last + 1, first slot."""
    branches: Sequence[BranchRow] = ()
    """Branch rows, which replace ``start``; their places ascend."""

    @property
    def end(self) -> int:
        """Position, or place, after the last row."""
        return self.branches[-1].place + 1 if self.branches else self.start + self.num_rows
