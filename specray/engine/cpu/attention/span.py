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

    def path_runs(self, row: Visibility) -> list[tuple[int, int, int]]:
        """The tokens that a row sees as ``runs``, each at its position: the prefix, then the ancestors."""
        found = [(first, min(last, row.prefix_len), slot) for first, last, slot in self.runs]
        found = [run for run in found if run[0] < run[1]]
        position = row.prefix_len
        for bit in range(row.ancestors.bit_length()):
            if not row.ancestors >> bit & 1:
                continue
            index = row.first_index + bit
            start, _, slot = next(run for run in self.runs if run[0] <= index < run[1])
            slot += index - start
            if found and found[-1][2] + position - found[-1][0] == slot:
                first, _, slot = found.pop()
                found.append((first, position + 1, slot))
            else:
                found.append((position, position + 1, slot))
            position += 1
        return found

    @property
    def end(self) -> int:
        return self.visibility[-1].kv_index + 1 if self.visibility else self.start + self.num_rows
