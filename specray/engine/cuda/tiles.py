"""Sizes of the tiles in which products are computed."""

from __future__ import annotations

from dataclasses import dataclass

_MANY_FEATURES = 8192
"""Output features from which on wider tiles still give every multiprocessor some programs."""
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


FREE, FIXED = TileRule(), TileRule(is_fixed=True)
"""The fastest tile for each number of rows, and one for all of them."""

GROUPED = Tile(16, 32, 4)
"""The tile of experts in codes, in every step: most experts of a small one have a row or two."""


def units_at_once(num_units: int) -> int:
    """Units of a step of the loop: of the layer alone, so that every row is summed in one order."""
    return next(step for step in _STEPS if num_units % step == 0)
