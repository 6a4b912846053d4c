"""Distinct experts that the rows of a target step hit, and what they make of its time.

A mixture's step reads the experts that its rows chose, so K costs what further rows hit. Of E experts (those
of all layers together) a row chooses k. Rows that chose independently and evenly would hit

    E (1 - (1 - k/E)^m)                                                          (MoESD, arXiv 2505.19645)

They do not: neighbours in a text share experts, and so do texts of one kind. So m, the number of independent
rows that would hit as many, is fitted to what the target counts: q sequences of r rows count as q^a r^b, with
both exponents at most 1. A tree's branches count whole, since their tokens differ. A step that hits U takes

    V / V(one row) = 1 - s + s U/k

times as long as its other work, where s is the share of experts in the step of one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specray.engine_info import RoutedExperts

PRIOR_EXPONENTS = (1.0, 0.9)
"""Exponents of sequences and of rows before anything was counted: those of models differ from 0.66 to 1."""
_PRIOR_WEIGHT = 0.5
"""Weight of each prior, as a squared logarithm: about that of one step of two rows."""
_FADING = 0.99
"""Forgetting factor of the fit, per counted step."""
_MIN_EXPONENT = 0.1
_MOST_HIT = 0.97
"""Share of the experts from which on a count says little of the rows."""


@dataclass(slots=True)
class ExpertUse:
    """What is known of one target's experts."""

    info: RoutedExperts | None = None
    """What the target says of itself; None: it is no mixture, and no step is longer for its experts."""
    sequences_exponent: float = PRIOR_EXPONENTS[0]
    rows_exponent: float = PRIOR_EXPONENTS[1]
    # Sums of products of both logarithms and of what is left of the answer's besides the prior.
    _xx: float = 0.0
    _xz: float = 0.0
    _zz: float = 0.0
    _xy: float = 0.0
    _zy: float = 0.0

    def add(self, num_rows: int, num_sequences: int, num_experts: int) -> None:
        """Takes a count of a step of chains."""
        info, sequences = self.info, max(1, min(num_sequences, num_rows))
        if info is None or num_rows < 2 or num_experts >= _MOST_HIT * info.num_experts:
            return
        alone = math.log1p(-info.num_chosen / info.num_experts)
        num_apart = math.log1p(-max(num_experts, info.num_chosen) / info.num_experts) / alone
        x, z = math.log(sequences), math.log(num_rows / sequences)
        first, second = PRIOR_EXPONENTS
        y = math.log(num_apart) - first * x - second * z
        # The nearer to all of them, the less a count says.
        weight = 1 - num_experts / info.num_experts
        self._xx = _FADING * self._xx + weight * x * x
        self._xz = _FADING * self._xz + weight * x * z
        self._zz = _FADING * self._zz + weight * z * z
        self._xy = _FADING * self._xy + weight * x * y
        self._zy = _FADING * self._zy + weight * z * y
        xx, zz = self._xx + _PRIOR_WEIGHT, self._zz + _PRIOR_WEIGHT
        determinant = xx * zz - self._xz * self._xz
        self.sequences_exponent = _within(first + (zz * self._xy - self._xz * self._zy) / determinant)
        self.rows_exponent = _within(second + (xx * self._zy - self._xz * self._xy) / determinant)

    def expected(self, num_rows: float, num_sequences: int, num_branches: float = 0.0) -> float:
        """Distinct experts of a step, in all layers; 0 where there are none.

        Args:
            num_rows: with the branches.
            num_branches: rows of trees besides the chains.
        """
        info = self.info
        if info is None:
            return 0.0
        sequences = max(1, num_sequences)
        rows = max(1.0, (num_rows - num_branches) / sequences)
        num_apart = sequences**self.sequences_exponent * rows**self.rows_exponent + num_branches
        return float(info.num_experts * (1 - (1 - info.num_chosen / info.num_experts) ** num_apart))

    def factor(self, num_experts: float) -> float:
        """Seconds of a step that hits so many, as a multiple of one that hits those of one row."""
        info = self.info
        if info is None or num_experts <= 0:
            return 1.0
        return 1 + info.share * (num_experts / info.num_chosen - 1)

    def expected_factor(self, num_rows: float, num_sequences: int, num_branches: float = 0.0) -> float:
        """``factor`` of the experts that a step is expected to hit."""
        if self.info is None:
            return 1.0
        return self.factor(self.expected(num_rows, num_sequences, num_branches))


def _within(exponent: float) -> float:
    return min(1.0, max(_MIN_EXPONENT, exponent))
