"""Rows of one sequence in a step, as input of the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specray.engine.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence: ``num_rows`` from ``first_row`` on, the first at position ``start``."""

    start: int
    first_row: int
    num_rows: int
    runs: Sequence[tuple[int, int, int]]
    """Contiguous pieces of the sequence in the cache, in order: first position, last + 1, first slot."""
    visibility: Sequence[Visibility] = ()
    """Visibility of each row, by ascending KV index; empty: the rows are a chain from ``start`` on."""

    @property
    def end(self) -> int:
        return self.visibility[-1].kv_index + 1 if self.visibility else self.start + self.num_rows
