"""Budgets of a step: how long rounds wait for the draft, and how many prompt tokens each engine prefills."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from specray.control.cost_model import CostModel

MIN_PREFILL_TOKENS = 16
"""Prompt tokens that the target prefills in every step, whatever they cost: a prompt must get on."""
MIN_DRAFT_PREFILL_TOKENS = 64
"""Tokens that the draft prefills at once, whatever they cost; the tokens of a round or two are fewer."""
PATIENCE_FACTOR = 4.0
"""Longest wait for the draft, as a multiple of its usual time."""


class Budgets:
    """Limits that follow from what engines are measured to take."""

    def __init__(self, cost_model: CostModel, *, max_k: Callable[[], int]) -> None:
        self._cost = cost_model
        self._max_k = max_k

    def patience_s(self) -> float | None:
        """Longest seconds for which a round may wait for the draft. None: the draft was not measured."""
        cost = self._cost
        if cost.draft.step_s(1) is None:
            return None
        proposal_s = self._max_k() * cost.draft_step_s(1, 0.0)
        slowest_s = max(proposal_s, cost.slowest_outcomes_s)
        return max(0.05, PATIENCE_FACTOR * (slowest_s + cost.round_trip_s))

    def prefill_tokens(self, num_rows: int, most: int, *, max_slowdown: float, num_running: int = 0) -> int:
        """Prompt tokens that may share a target step with the running sessions.

        Args:
            num_rows: of the running sessions, >= 1.
            most: that may be asked for, >= 1.
            max_slowdown: largest time of the step, as a multiple of its time without the prompt tokens.
            num_running: running sessions.

        Returns:
            In 1..most: what fits into that time, but never fewer than MIN_PREFILL_TOKENS.
        """
        target = self._cost.target
        times = target.of(is_overlapped=True)
        alone_s = times.least(num_rows)
        if alone_s is None:
            return most
        # The attention to the sessions' contexts is part of the step, and does not grow.
        more_s = (max_slowdown - 1) * times.load_factor * target.context_s(num_running)
        fitting = (target.prompts or times).largest_within(max_slowdown * alone_s + more_s) - num_rows
        return min(most, max(MIN_PREFILL_TOKENS, fitting))

    def draft_prefill_tokens(self, most: int, *, num_rows: int, num_running: int, most_s: float) -> int:
        """Tokens that the draft may read at once while running sessions are drafted for.

        Args:
            most: that may be asked for, >= 1.
            num_rows: of the running sessions' target step.
            num_running: running sessions.
            most_s: longest seconds that the draft may read, however long the target's step is.

        Returns:
            In 1..most: what it reads in a target step, but never fewer than MIN_DRAFT_PREFILL_TOKENS.
        """
        step_s = self._cost.usual_verify_s(num_rows, num_running)
        if step_s is None:
            return most
        # Where both overlap, the draft also works on outcomes meanwhile.
        within_s = min(step_s - self._cost.slowest_outcomes_s, most_s)
        num_readable = bisect_right(
            range(1, most + 1), within_s, key=lambda size: self._cost.draft_step_s(size, 0.0)
        )
        return min(most, max(MIN_DRAFT_PREFILL_TOKENS, num_readable))
