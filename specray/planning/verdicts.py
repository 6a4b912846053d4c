"""What a simulated target decides: seeded draws with the rates that were measured.

Tokens stand for ranks. Every draft token is ``GUESS``; the token after the accepted ones is the rank at which
the draft would have listed it (``GUESS`` is the first), so a branch of outcomes is hit as often as branches
were in the measurement, and neither engine has to know of the other.
"""

from __future__ import annotations

import random
from typing import Final

from specray.planning.profile import AcceptanceProfile

GUESS: Final = 1
"""The draft's first choice."""
UNFORESEEN: Final = 0
"""A token that the draft would not have listed."""
MISSES_BY_WIDTH: Final = (1.0, 0.5, 0.3)
"""Where hits were not measured: of the tokens that the first guess misses, how many are missed with 1, 2 or 3
branches. Measured on the embedded pair."""
MAX_RANK: Final = len(MISSES_BY_WIDTH)


class Verdicts:
    """Draws of one acceptance profile.

    Args:
        acceptance: rates by position; None: there is no draft.
    """

    def __init__(self, acceptance: AcceptanceProfile | None) -> None:
        self._rates = acceptance.by_position if acceptance is not None else (0.0,)
        measured = {} if acceptance is None else {one.width: one.rate for one in acceptance.hit_rates}
        self._rank_shares = _rank_shares(measured, sum(self._rates) / len(self._rates))

    def draw(self, rng: random.Random, num_drafts: int) -> tuple[int, int]:
        """(accepted tokens, next token) of a round that verifies so many draft tokens."""
        rates = self._rates
        for position in range(num_drafts):
            if rng.random() >= rates[min(position, len(rates) - 1)]:
                return position, self._rank(rng)
        # What the draft would have guessed next is right as often as a further draft token.
        if rng.random() < rates[min(num_drafts, len(rates) - 1)]:
            return num_drafts, GUESS
        return num_drafts, self._rank(rng)

    def _rank(self, rng: random.Random) -> int:
        draw = rng.random()
        for rank, share in enumerate(self._rank_shares, start=GUESS):
            if draw < share:
                return rank
        return UNFORESEEN


def _rank_shares(measured: dict[int, float], mean_rate: float) -> tuple[float, ...]:
    """Cumulative: how often the next token is among the first 1, 2 ... guesses."""
    shares: list[float] = []
    for width in range(1, MAX_RANK + 1):
        known = measured.get(width, 1 - (1 - mean_rate) * MISSES_BY_WIDTH[width - 1])
        shares.append(max([known, *shares]))
    return tuple(shares)
