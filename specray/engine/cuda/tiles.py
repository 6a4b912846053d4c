"""Sizes of the tiles in which products are computed."""

from __future__ import annotations

from dataclasses import dataclass

_MANY_FEATURES = 8192
"""Output features from which on wider tiles still give every multiprocessor some programs."""
_PROMPT_ROWS = 512
"""Rows of a step up to which tiles of experts are small; longer ones are prompts, which products bind."""
_STEPS = (4, 2, 1)
"""Units of 32 input features at once; the first that divides a layer's."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program of a product."""

    rows: int
    columns: int
    """Output features."""
    num_warps: int
    num_stages: int = 4
    """Steps whose weights are on their way."""


@dataclass(frozen=True, slots=True)
class TileRule:
    """Which tile computes a layer's product.

    Rows and columns of a tile change no sum: input features are added in the order of the layer, and rows do
    not meet. But tiles of 64 rows and more are computed by other instructions of newer devices, which may
    round in another way.
    """

    is_fixed: bool = False
    """Whether every number of rows has the same tile, so that a row's bits are the same in any step."""

    def tile(self, num_rows: int, num_columns: int) -> Tile:
        """The tile for a product of ``num_rows`` with a weight of ``num_columns`` output features."""
        few = 16 if num_columns < _MANY_FEATURES else 32
        if self.is_fixed:
            return Tile(32, few, 2 if few == 16 else 4)
        if num_rows <= 32:
            return Tile(16 if num_rows <= 16 else 32, few, 2 if few == 16 else 4)
        if num_rows <= 64:
            return Tile(64, 32, 4)
        return Tile(128, 64, 8, 3)

    def grouped_rows(self, num_rows: int) -> int:
        """Rows of a tile of experts in a step of ``num_rows``."""
        is_small = self.is_fixed or num_rows <= _PROMPT_ROWS
        return (_GROUPED if is_small else _GROUPED_PROMPT).rows


FREE, FIXED = TileRule(), TileRule(is_fixed=True)
"""The fastest tile for each number of rows, and one for all of them."""

_GROUPED, _GROUPED_PROMPT = Tile(16, 32, 4), Tile(64, 64, 4, 3)
"""Tiles of experts. 16 rows are the fewest that the matrix unit takes; most experts of a small step have one
or two."""


def grouped_tile(num_rows: int) -> Tile:
    """The tile of experts with that many rows."""
    return _GROUPED if num_rows == _GROUPED.rows else _GROUPED_PROMPT


def depth_of(in_features: int, item_size: int) -> int:
    """Input features of plain weights at once: of the layer alone, so that every row has one order."""
    return min(256 // item_size, max(16, 1 << (in_features - 1).bit_length()))


def units_at_once(num_units: int) -> int:
    """Units of a step of the loop: of the layer alone, so that every row is summed in one order."""
    return next(step for step in _STEPS if num_units % step == 0)
