"""How much sessions speculate: those that share the target's steps decide it together.

One that waits for the draft while others do not keeps them waiting, or misses their step and has fewer of its
own: some speculating can be slower than all or none. And where it hardly pays, one session's few first drafts
decide nothing; those of all are many. What is promised is believed as far as ``trials`` have shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from specray.control.decisions import Decisions
from specray.control.estimators import Rate
from specray.control.experiments import Level, Trials, size_of
from specray.control.state import Judged, Pacing, Plan

FIRST_REVIEW_STEPS = 4
REVIEW_STEPS = 16
"""A decision stands for so many, and while about as many sessions run; one that turned, or was of another
number, for fewer, each time twice as many: what it promised had not been tried."""
OFF_REVIEW_STEPS, OFF_REVIEW_GROWTH = 128, 4
"""As REVIEW_STEPS, without the model, and how many times as many each time: until a session tries it again,
nothing is learnt of it, and where steps are short a decision is part of one."""
MIN_GAIN = 1.08
"""Speculation must promise so much more than none to be taken up: none is sure, and predictions err by what
the machine does meanwhile."""
MAX_SAMPLE = 8
"""Sessions that stand for all when their plan is chosen."""
LEAST_GAIN = 1.03
"""It is left when it promises less than this."""
MIN_FILLER_GAIN, LEAST_FILLER_GAIN = 1.03, 1.0
"""As MIN_GAIN and LEAST_GAIN, of fillers: what they bring is not predicted, but seen in trials."""
_UNSETTLED_STEPS = 2
"""After a turn, which show neither way of working: the draft reads what it has missed."""


@dataclass(slots=True)
class _Step:
    """What the verdicts of a step have in common."""

    num_joining: int = 0
    """Of sessions that take part."""
    num_drafted: int = 0
    """With draft tokens, whoever proposed them."""
    num_on: int = 0
    """Under a plan with the model."""
    has_probe: bool = False


@dataclass(slots=True)
class Together:
    """The decision of all sessions under one policy, and what the next one is made from."""

    level: Level | None = None
    """None: nothing was decided yet."""
    gain: float = MIN_GAIN
    """What is believed of the model, as a multiple of plain decoding."""
    trials: Trials = field(default_factory=Trials)
    decisions: Decisions = field(default_factory=Decisions)
    """Told of each; trials tell it themselves."""
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
    _promises: dict[Level, float] = field(default_factory=dict)
    """Made for it."""
    _is_trial_due: bool = False
    _num_steps: int = FIRST_REVIEW_STEPS
    """For which it stands."""
    _step: _Step = field(default_factory=_Step)
    _num_unsettled: int = 0

    @property
    def is_on(self) -> bool | None:
        """Sessions have plans with the model, also while none is tried; None: nothing was decided yet."""
        return None if self.level is None else Level.MODEL in (self.level, self.trials.tried)

    @property
    def is_plain(self) -> bool:
        """Nobody has draft tokens, not even fillers."""
        tried = self.trials.tried
        return (self.level if tried is None else tried) is Level.PLAIN

    @property
    def is_trying_plain(self) -> bool:
        """Plans are left aside for a few steps."""
        return self.trials.tried is Level.PLAIN

    def add(self, pacing: Pacing, *, is_drafted: bool = False) -> None:
        """One round of a session that takes part; ``is_drafted``: with draft tokens of any source."""
        self._num_rounds += 1
        self._sessions[id(pacing)] = pacing
        step = self._step
        step.num_joining += 1
        step.num_drafted += is_drafted
        step.num_on += pacing.plan is not None and not pacing.plan.is_off
        if pacing.is_probing:
            step.has_probe = True
            # It has learnt something.
            self._num_steps = min(self._num_steps, REVIEW_STEPS)

    def end_step(
        self,
        seconds: float | None,
        *,
        is_reading: bool = False,
        num_sessions: int,
        num_running: int,
        num_tokens: int,
    ) -> None:
        """All verdicts of a step are there.

        Args:
            seconds: since the end of the step before; None: it shows nothing of speculation.
            is_reading: the draft has read meanwhile, as it must of every prompt, where it is used.
            num_sessions: of the step.
            num_running: sessions, in the step or waiting for the next.
            num_tokens: that were committed.
        """
        step, self._step = self._step, _Step()
        if self.level is None:
            return
        is_seen = seconds is not None and seconds > 0 and self._is_alike(step, num_sessions)
        if is_reading and (self._num_unsettled or self.trials.tried is not None or not self.is_on):
            # It catches up with what it was not told before.
            is_seen = False
        if is_seen and self._num_unsettled:
            self._num_unsettled -= 1
            is_seen = False
        if seconds is None or not is_seen:
            has_turned = self.trials.pass_by()
        else:
            level = self.trials.tried
            level = self.level if level is None else level
            has_turned = self.trials.observe(level, num_running, num_tokens, seconds)
        if has_turned:
            self._turn()
            # What was tried is weighed with the next round.
            self._num_steps = 0 if self.trials.running is None else self._num_steps
        elif self._num_running and size_of(num_running) == size_of(self._num_running):
            # Decisions are rare where little changes, and a burst may be over before the next one.
            self._is_trial_due = self.trials.is_due(self.level, self._promises, num_running)

    def _is_alike(self, step: _Step, num_sessions: int) -> bool:
        """All sessions of the step worked as was decided, or tried."""
        if step.num_joining == 0 or step.num_joining < num_sessions or step.has_probe:
            return False
        if self.is_plain:
            return step.num_drafted == 0
        if self.is_on:
            # With fewer, the draft is not there, or has yet to read.
            return step.num_on == step.num_joining <= 2 * step.num_drafted
        return step.num_on == 0

    def _turn(self) -> None:
        self.num_turns += 1
        self._num_unsettled = _UNSETTLED_STEPS

    def is_due(self, num_running: int) -> bool:
        """It is time to decide anew."""
        if self.level is None or self._is_trial_due or self._is_another(num_running):
            return True
        return self.trials.running is None and self._num_rounds >= self._num_steps * num_running

    def take_mean(self, new: Pacing) -> Pacing:
        """A session as all are on average; ``new`` where none had a round yet. Begins to collect anew."""
        if self._sessions:
            sessions = list(self._sessions.values())
            self._last = mean_of(sessions)
            self.sample = sessions[:: -(-len(sessions) // MAX_SAMPLE)]
            self._sessions.clear()
            self._num_rounds = 0
        return self._last or new

    def decide(self, promised: float, num_running: int) -> None:
        """``promised`` of the model, as a multiple of plain decoding, decides, as far as it is believed."""
        self._promises = promises = {Level.FILLERS: 1.0, Level.MODEL: promised}
        believed = self.trials.believed(promises, num_running)
        self.gain = believed[Level.MODEL]
        level = self._choose(believed)
        is_turn = level is not self.level
        is_another = self._is_another(num_running)
        if is_turn:
            self.trials.take_up(level, num_running)
        elif is_another:
            self.trials.abandon()
        tried = self.trials.begin(level, promises, num_running)
        most = REVIEW_STEPS if level is Level.MODEL else OFF_REVIEW_STEPS
        if is_turn or is_another:
            self._num_steps = FIRST_REVIEW_STEPS
        else:
            growth = 2 if level is Level.MODEL else OFF_REVIEW_GROWTH
            self._num_steps = min(most, growth * max(1, self._num_steps))
        self.level, self._num_running, self._is_trial_due = level, num_running, False
        if is_turn or tried is not None:
            self._turn()
        self.decisions.decided(level, tried, promised=promised, believed=self.gain, num_running=num_running)

    def _choose(self, believed: Mapping[Level, float]) -> Level:
        """The level that brings most; that of now is left only for one that brings a little more."""
        now = Level.FILLERS if self.level is None else self.level
        filler, model = believed[Level.FILLERS], believed[Level.MODEL]
        takes_filler = filler >= (MIN_FILLER_GAIN if now is Level.PLAIN else LEAST_FILLER_GAIN)
        if model >= (LEAST_GAIN if now is Level.MODEL else MIN_GAIN):
            margin = MIN_FILLER_GAIN if now is Level.MODEL else 1 / MIN_FILLER_GAIN
            return Level.FILLERS if takes_filler and filler > margin * model else Level.MODEL
        return Level.FILLERS if takes_filler else Level.PLAIN

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
