"""Features of tokens as they cross the wire: rows of bfloat16 numbers, one per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

ITEM_BYTES: Final = 2
"""Bytes of a bfloat16 number."""
MAX_FEATURE_BYTES: Final = 8 * 1024 * 1024
"""Bytes of features in one message, at most: those of 1024 tokens at a hidden size of 4096. Others follow in
later messages."""


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features of consecutive tokens of one sequence.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """

    first: int
    """Index of the first row's token."""
    num_rows: int
    data: bytes
    """Row after row, bfloat16, little-endian."""

    def __post_init__(self) -> None:
        if self.first < 0 or self.num_rows < 1:
            raise ValueError(
                f"features has first {self.first} and num_rows {self.num_rows}; allowed: 0 or more, 1 or more"
            )
        num_bytes = len(self.data)
        if not num_bytes or num_bytes % (ITEM_BYTES * self.num_rows):
            raise ValueError(
                f"features.data has {num_bytes} bytes for {self.num_rows} rows; allowed: a multiple of "
                f"{ITEM_BYTES * self.num_rows}, above 0"
            )

    @property
    def end(self) -> int:
        """Index after the last row's token."""
        return self.first + self.num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return len(self.data) // self.num_rows

    def within(self, first: int, end: int) -> FeatureRows | None:
        """The rows of the tokens ``first..end - 1``, as far as they are here; None: none of them is."""
        first, end = max(first, self.first), min(end, self.end)
        if first >= end:
            return None
        if (first, end) == (self.first, self.end):
            return self
        size = self.row_bytes
        data = self.data[(first - self.first) * size : (end - self.first) * size]
        return FeatureRows(first, end - first, data)

    def followed_by(self, rows: FeatureRows) -> FeatureRows:
        """These rows and those that come next.

        Args:
            rows: begin where these end, and are of the same size.
        """
        assert rows.first == self.end and rows.row_bytes == self.row_bytes, (self.end, rows.first)
        return replace(self, num_rows=self.num_rows + rows.num_rows, data=self.data + rows.data)


def max_rows(feature_size: int) -> int:
    """Most rows of one message.

    Args:
        feature_size: numbers of a row, at least 1.
    """
    return max(1, MAX_FEATURE_BYTES // (ITEM_BYTES * feature_size))
