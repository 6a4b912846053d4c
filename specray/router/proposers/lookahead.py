"""Whether looking ahead pays: a window takes rows of every step, whether or not its n-grams are of use.

What rounds with a window commit is compared with what their rows take by the target's measured steps. Where
the window loses, there is none for a while; then some rounds have one again, to see what has changed.
"""

from __future__ import annotations

from typing import Final

from specray.control.cost_model import CostModel
from specray.control.estimators import Rate
from specray.draft_tokens import LookaheadBudget

PRIOR_TOKENS, PRIOR_ROUNDS = 1.6, 24.0
"""Tokens per round with a window before any was seen, and the rounds that this estimate counts as."""
FADING: Final = 0.995
"""Forgetting factor per round: some two hundred rounds, of all sessions."""
REST_ROUNDS: Final = 1024
"""Rounds without a window, of all sessions, where it does not pay."""
TRIAL_ROUNDS: Final = 24
"""Rounds with a window after them."""


class LookaheadControl:
    """Chooses, for each round of a session, whether the target looks ahead."""

    def __init__(self, cost_model: CostModel, budget: LookaheadBudget) -> None:
        self.budget = budget
        self._cost_model = cost_model
        self._tokens = Rate(PRIOR_TOKENS, PRIOR_ROUNDS, fading=FADING)
        self._rows = Rate(1 + budget.max_window_rows, PRIOR_ROUNDS, fading=FADING)
        self._num_rested = 0

    def choose(self, num_running: int, *, is_fixed: bool) -> LookaheadBudget | None:
        """The window of the next round; None: without.

        Args:
            is_fixed: K is set, and a window with it, whether or not it pays.
        """
        if is_fixed or self._pays(num_running):
            self._num_rested = 0
            return self.budget
        self._num_rested = (self._num_rested + 1) % (REST_ROUNDS + TRIAL_ROUNDS)
        return self.budget if self._num_rested >= REST_ROUNDS else None

    def observe(self, num_tokens: int, num_drafts: int) -> None:
        """Takes a round with a window, the tokens that it committed, and its draft tokens."""
        self._tokens.add(num_tokens, 1)
        self._rows.add(1 + self.budget.max_window_rows + num_drafts, 1)

    def _pays(self, num_running: int) -> bool:
        plain_s = self._cost_model.usual_verify_s(num_running, num_running)
        window_s = self._cost_model.usual_verify_s(round(num_running * self._rows.value), num_running)
        return plain_s is None or window_s is None or self._tokens.value * plain_s >= window_s
