"""Whether sessions speculate at all: those that share the target's steps decide it together.

One that waits for the draft while others do not keeps them waiting, or misses their step and has fewer of its
own: some speculating can be slower than all or none. And where it hardly pays, one session's few first drafts
decide nothing; those of all are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from specray.router.estimates import Rate
from specray.router.plan import Judged, Pacing, Plan

FIRST_REVIEW_STEPS = 4
REVIEW_STEPS = 16
"""A decision stands for so many, and while about as many sessions run; one that turned, or was of another
number, for fewer, each time twice as many: what it promised had not been tried."""
MIN_GAIN = 1.08
"""Speculation must promise so much more than none to be taken up: none is sure, and predictions err by what
the machine does meanwhile."""
MAX_SAMPLE = 8
"""Sessions that stand for all when their plan is chosen."""
LEAST_GAIN = 1.03
"""It is left when it promises less than this."""


@dataclass(slots=True)
class Together:
    """The decision of all sessions under one policy, and what the next one is made from."""

    is_on: bool | None = None
    """None: nothing was decided yet."""
    gain: float = MIN_GAIN
    """What speculation promised last, as a multiple of plain decoding."""
    plan: Plan | None = None
    """Of all who speculate, where there are several; each has its own part of it."""
    num_turns: int = 0
    """How often it was decided otherwise than before."""
    sample: Sequence[Pacing] = ()
    """Some of the sessions that the last mean is of."""
    _num_rounds: int = 0
    """Since the last decision."""
    _sessions: dict[int, Pacing] = field(default_factory=dict)
    """Those that had a round since then, by identity."""
    _last: Pacing | None = None
    _num_running: int = 0
    """At the last decision."""
    _num_steps: int = FIRST_REVIEW_STEPS
    """For which it stands."""

    def add(self, pacing: Pacing) -> None:
        """One round of a session that takes part."""
        self._num_rounds += 1
        self._sessions[id(pacing)] = pacing

    def is_due(self, num_running: int) -> bool:
        """It is time to decide anew."""
        if self._num_rounds >= self._num_steps * num_running or self.is_on is None:
            return True
        return self._is_another(num_running)

    def take_mean(self, new: Pacing) -> Pacing:
        """A session as all are on average; ``new`` where none had a round yet. Begins to collect anew."""
        if self._sessions:
            sessions = list(self._sessions.values())
            self._last = mean_of(sessions)
            self.sample = sessions[:: -(-len(sessions) // MAX_SAMPLE)]
            self._sessions.clear()
            self._num_rounds = 0
        return self._last or new

    def decide(self, gain: float, num_running: int) -> None:
        """``gain`` decides."""
        self.gain = gain
        is_on = gain >= (LEAST_GAIN if self.is_on else MIN_GAIN)
        is_turn = is_on is not self.is_on
        is_new = is_turn or self._is_another(num_running)
        self._num_steps = FIRST_REVIEW_STEPS if is_new else min(REVIEW_STEPS, 2 * self._num_steps)
        self.num_turns += is_turn
        self.is_on, self._num_running = is_on, num_running

    def agree(self, plan: Plan | None) -> None:
        """What all do who speculate; None: each as it likes."""
        self.num_turns += plan != self.plan
        self.plan = plan

    def _is_another(self, num_running: int) -> bool:
        """Half as many sessions run as at the last decision, or twice as many."""
        return not self._num_running < 2 * num_running < 4 * self._num_running


def mean_of(sessions: Sequence[Pacing]) -> Pacing:
    """A session as these, of which there is one at least, are on average."""
    judged = [pacing.judged for pacing in sessions]
    return Pacing(
        Rate(fmean(pacing.acceptance.value for pacing in sessions)),
        Rate(fmean(pacing.continuation.value for pacing in sessions)),
        Judged(
            Rate(fmean(one.num_drafts.value for one in judged)),
            Rate(fmean(one.num_accepted.value for one in judged)),
        ),
        draft_is_judge=2 * sum(pacing.draft_is_judge for pacing in sessions) > len(sessions),
    )
