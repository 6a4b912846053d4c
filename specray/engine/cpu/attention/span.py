"""The rows of one sequence in a step, as the attention kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specray.engine.attention.mask import Visibility


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence: ``num_rows`` from ``first_row`` on, the first at position ``start``."""

    start: int
    first_row: int
    num_rows: int
    runs: Sequence[tuple[int, int, int]]
    """Where its tokens lie, in order: first position, last + 1, slot of the first."""
    visibility: Sequence[Visibility] = ()
    """What each row sees, their KV indices ascending; empty: the rows are a chain from ``start`` on."""

    @property
    def end(self) -> int:
        """KV index after the last row."""
        return self.visibility[-1].kv_index + 1 if self.visibility else self.start + self.num_rows
