"""What a simulated target decides: seeded draws with the rates that were measured.

Tokens stand for ranks. Every draft token is ``GUESS``; the token after the accepted ones is the rank at which
the draft would have listed it (``GUESS`` is the first), so a branch of outcomes is hit as often as branches
were in the measurement, and neither engine has to know of the other.
"""

from __future__ import annotations

import random
import zlib
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

    A request is given the agreements of one of the measured outputs: an output that the draft writes well is
    written well for long, and a router that chooses K for each session makes something of that. Behind their
    end they begin again.

    Args:
        acceptance: None: there is no draft.
        seed: of the choice.
    """

    def __init__(self, acceptance: AcceptanceProfile | None, *, seed: int = 0) -> None:
        self._seed = seed
        self._rates = acceptance.by_position if acceptance is not None else (0.0,)
        self._agreements = () if acceptance is None else acceptance.agreements
        measured = {} if acceptance is None else {one.width: one.rate for one in acceptance.hit_rates}
        self._rank_shares = _rank_shares(measured, sum(self._rates) / len(self._rates))

    def draw(
        self, rng: random.Random, num_drafts: int, *, request_id: str = "", position: int = 0
    ) -> tuple[int, int]:
        """(accepted tokens, next token) of a round.

        Args:
            num_drafts: that it verifies.
            position: of the first of them in the output.
        """
        agreement = self._agreement_of(request_id)
        for index in range(num_drafts + 1):
            if agreement is None:
                agrees = rng.random() < self._rates[min(index, len(self._rates) - 1)]
            else:
                agrees = agreement[(position + index) % len(agreement)] == "1"
            if not agrees:
                return index, self._rank(rng)
        # What the draft would have guessed next is right as often as a further draft token.
        return num_drafts, GUESS

    def _agreement_of(self, request_id: str) -> str | None:
        if not self._agreements:
            return None
        number = zlib.crc32(f"{self._seed}-{request_id}".encode())
        return self._agreements[number % len(self._agreements)]

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
