"""Warns of a drafter of the target's features whose first draft tokens are seldom accepted.

Such a drafter was made for one target, and its first token of a round has true features: where it is right
less often than 0.4, something is likely wrong with how it is fed rather than with the text.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

NUM_ROUNDS = 256
"""Verified rounds after which it is decided."""
LEAST_ACCEPTANCE = 0.4
"""Share of accepted first draft tokens below which there is a warning."""


class FirstTokens:
    """Counts the first draft tokens of a drafter until it is known whether to warn; then counts no more."""

    def __init__(self) -> None:
        self._drafter = ""
        self._num_rounds = 0
        self._num_accepted = 0

    def observe(self, drafter: str, num_accepted: int) -> None:
        """Counts a verified round with draft tokens; of a tree, ``num_accepted`` of its first chain.

        Args:
            drafter: its name; another one than before is counted anew.
        """
        if drafter != self._drafter:
            self._drafter, self._num_rounds, self._num_accepted = drafter, 0, 0
        if self._num_rounds == NUM_ROUNDS:
            return
        self._num_rounds += 1
        self._num_accepted += num_accepted > 0
        rate = self._num_accepted / NUM_ROUNDS
        if self._num_rounds == NUM_ROUNDS and rate < LEAST_ACCEPTANCE:
            logger.warning(
                "of the first draft tokens of drafter %r, %.3f were accepted in %d rounds (expected: %.1f or "
                "more); it may be of another target, name layers by another convention (a layer's output, or "
                "its input), have its norm in another place, or be trained too little",
                drafter,
                rate,
                NUM_ROUNDS,
                LEAST_ACCEPTANCE,
            )
