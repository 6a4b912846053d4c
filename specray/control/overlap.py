"""Whether draft and target take turns or work at the same time, by what each way has brought.

Predictions know both engines' steps, alone and beside each other. They do not know what else a way of working
costs: a draft that shares cores or a device with the target, answers that come too late, rounds that go
without a draft because it stalls. So what is predicted only says whether overlapping is worth a try. Then the
tokens of each round are compared with those that taking turns promises for as many seconds, whichever way is
at work: of two texts the harder one promises fewer. Where overlapping brings 5 % more, all sessions change
over with their next plan. What was measured of the way that is not used fades, so that it is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specray.config import SpeculationConfig
from specray.control.experiments import size_class
from specray.control.state import Observer
from specray.types import Overlap

DECISION_ROUNDS, UNDRAFTED_SHARE = 16, 0.125
"""Rounds of each session between two decisions, and as how much of one a round without the draft counts: it
shows nothing of either way."""
MIN_GAIN, KEEP_GAIN = 1.05, 0.98
"""Least ratios to the tokens per second of taking turns: to begin to overlap, and to go on."""
PRIOR_TOKENS = 24.0
"""Promised tokens that count as measured before any were."""
FADING: Final = 0.98
"""Forgetting factor per round of the way at work: some fifty rounds count."""
OTHER_SIZE_FADING: Final = 0.5
"""Forgetting factor where half as many sessions run as before, or twice as many."""
FIRST_RETRY_ROUNDS, MAX_RETRY_ROUNDS = 256, 8192
"""Rounds of each session in which most of what overlapping brought is forgotten while engines take turns: at
first, and at most; twice as many after each try that brought nothing."""
UNSETTLED_ROUNDS = 3
"""First rounds of a try, which count for neither way: the draft catches up, and nothing is prepared yet."""
MAX_SURPRISE = 8.0
"""Most tokens that one of a round counts as promised: a pause shows nothing of a way."""


@dataclass(slots=True)
class WayOfWorking:
    """Tokens that one way of working has brought, as a share of those that turns promise for its seconds."""

    tokens: float = 0.0
    promised: float = 0.0

    def share(self, prior: float) -> float:
        """Tokens brought for each that was promised; ``prior`` counts as its first tokens."""
        return (self.tokens + prior * PRIOR_TOKENS) / (self.promised + PRIOR_TOKENS)

    def add(self, tokens: float, promised: float) -> None:
        """Takes a round."""
        self.tokens += tokens
        self.promised += min(promised, MAX_SURPRISE * tokens)

    def fade(self, factor: float) -> None:
        self.tokens *= factor
        self.promised *= factor


class OverlapChoice:
    """The way in which all sessions of a router work; see the module.

    Attributes:
        is_overlapped: engines work at the same time; else they take turns.
        is_open: under ``auto``, and the draft at hand has hardware of its own: both ways are allowed.
    """

    def __init__(self, config: SpeculationConfig, observer: Observer | None = None) -> None:
        self.is_overlapped = False
        self._is_allowed = True
        self._is_new = False
        """Engines overlap since the last decision."""
        self._observer = observer
        self._turns, self._overlapped = WayOfWorking(), WayOfWorking()
        self._size = 0
        self._num_rounds = 0.0
        """Rounds since the last decision, those without the draft's tokens by their share."""
        self._retry_rounds = FIRST_RETRY_ROUNDS
        self.configure(config)

    def configure(self, config: SpeculationConfig) -> None:
        """Works as is configured from now on; ``auto`` begins with what is at work."""
        self.is_auto = config.overlap == "auto"
        if not self.is_auto:
            self.is_overlapped = config.overlap is not Overlap.SERIAL
        self.allow(self._is_allowed)

    def allow(self, is_allowed: bool) -> bool:
        """Takes whether the draft at hand may work while the target does, under ``auto``.

        On the target's own cores it takes from them what it gains, and a try costs.

        Returns:
            True: the way has changed.
        """
        self._is_allowed, before = is_allowed, self.is_overlapped
        self.is_open = self.is_auto and is_allowed
        if self.is_auto and not is_allowed:
            self.is_overlapped = False
        return self.is_overlapped is not before

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """Overlaps between which plans choose now, under ``auto``."""
        return (Overlap.AHEAD, Overlap.ENUMERATE) if self.is_overlapped else (Overlap.SERIAL,)

    def observe(self, num_tokens: int, promised: float, num_running: int) -> None:
        """Takes a round for which the draft worked, or should have.

        Args:
            num_tokens: that it committed.
            promised: tokens for its seconds, by the session's best plan that takes turns.
        """
        if size_class(num_running) != self._size:
            self._size = size_class(num_running)
            for way in (self._turns, self._overlapped):
                way.fade(OTHER_SIZE_FADING)
        if self.is_overlapped and self._num_rounds < UNSETTLED_ROUNDS * num_running and self._is_new:
            return
        at_work = self._overlapped if self.is_overlapped else self._turns
        at_work.fade(FADING)
        at_work.add(num_tokens, promised)
        if not self.is_overlapped:
            self._overlapped.fade(1 - 1 / (self._retry_rounds * num_running))

    def is_due(self, num_running: int, *, is_drafted: bool) -> bool:
        """Takes that a session had a round; ``is_drafted``: the draft's. True: a decision is due."""
        self._num_rounds += 1 if is_drafted else UNDRAFTED_SHARE
        return self.is_open and self._num_rounds >= DECISION_ROUNDS * num_running

    def decide(self, predicted_gain: float, num_running: int) -> bool:
        """Chooses the way. True: it has changed.

        Args:
            predicted_gain: tokens per second of the best plan that overlaps, as a multiple of those of the
                best that takes turns.
        """
        self._num_rounds = 0
        turns = self._turns.share(1.0)
        gain = self._overlapped.share(predicted_gain * turns) / turns
        before, was_new = self.is_overlapped, self._is_new
        self.is_overlapped = gain >= (KEEP_GAIN if before else MIN_GAIN)
        self._is_new = self.is_overlapped and not before
        if before and not self.is_overlapped:
            # It is tried ever more rarely.
            self._retry_rounds = min(MAX_RETRY_ROUNDS, 2 * self._retry_rounds)
        elif before and not was_new and gain >= MIN_GAIN:
            self._retry_rounds = FIRST_RETRY_ROUNDS
        if self._observer is not None:
            self._observer.chose_overlap(
                is_overlapped=self.is_overlapped,
                predicted_gain=predicted_gain,
                calibrated_gain=gain,
                num_running=num_running,
            )
        return self.is_overlapped is not before
