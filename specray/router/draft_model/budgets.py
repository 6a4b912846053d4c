"""Budgets of a step: how long rounds wait for the draft, how many prompt tokens each engine prefills, and how
many features go with a message to the draft.

A draft that reads features drafts from those of all tokens but the last. They come with verdicts, and go on
with the next item; what one message cannot carry follows in prefill chunks, and rounds go without the draft
until then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from specray.control.cost_model import CostModel
from specray.feature_rows import MAX_FEATURE_BYTES
from specray.router.session.session import Session
from specray.router.transport.links import DraftLink
from specray.types import SpeculateItem

MIN_PREFILL_TOKENS = 16
"""Prompt tokens that the target prefills in every step, whatever they cost: a prompt must get on."""
MIN_DRAFT_PREFILL_TOKENS = 64
"""Tokens that the draft prefills at once, whatever they cost; the tokens of a round or two are fewer."""


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
        # Longest wait for the draft, as a multiple of its usual time.
        return max(0.05, 4.0 * (slowest_s + cost.round_trip_s))

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


def feature_size(link: DraftLink | None) -> int:
    """Numbers of a row of features that the leased draft reads; 0: it reads none, or there is no draft."""
    return 0 if link is None else link.info.feature_size


def needs_chunk(session: Session) -> bool:
    """Features wait that no question to the draft can bring: more must come, or one message is too small."""
    if session.draft.in_flight is not None or session.features.waiting is None:
        return False
    return not session.has_features or session.features.num_bytes > MAX_FEATURE_BYTES


class FeatureRoom:
    """Shares out the bytes of features of each message to the draft."""

    def __init__(self) -> None:
        self._room = MAX_FEATURE_BYTES
        """Bytes left in the message in the making."""

    def begin(self) -> None:
        self._room = MAX_FEATURE_BYTES

    def fits(self, session: Session) -> bool:
        """The message has room for the features of the session that a chunk would bring."""
        return min(session.features.num_bytes, MAX_FEATURE_BYTES) <= self._room

    def can_ask(self, session: Session) -> bool:
        """The draft has all that it needs with a question."""
        return session.has_features and session.features.num_bytes <= self._room

    def note(self, item: SpeculateItem) -> None:
        if item.features is not None:
            self._room -= len(item.features.data)
