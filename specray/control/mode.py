"""Chooses the mode of all sessions: plain decoding, the n-gram fallback alone, or the draft model too.

Sessions that share the target's steps decide it together. One that waits for the draft while others do not
keeps them waiting, or misses their step and has fewer of its own: some speculating can be slower than all or
none. And where speculation hardly pays, one session's few first drafts show nothing; those of all are many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specray.control.experiments import Experiments, size_class
from specray.control.goodput import MIN_SPEEDUP, mean_of
from specray.control.state import Mode, Observer, Plan, SessionStats

FIRST_DECISION_STEPS = 4
"""Steps for which a decision holds after a change of mode or of the number of sessions."""
DECISION_STEPS = 16
"""Steps for which a decision with the model holds at most; twice as many as the one before."""
OFF_DECISION_STEPS = 128
"""Steps for which a decision without the model holds at most; four times as many as the one before: until a
session explores it, nothing is measured of the model, and where steps are short a decision is part of one."""
KEEP_SPEEDUP = 1.03
"""Least calibrated speedup at which the model stays on; MIN_SPEEDUP switches it on."""
NGRAM_MIN_SPEEDUP, NGRAM_KEEP_SPEEDUP = 1.03, 1.0
"""Least speedups at which the n-gram fallback alone is switched on, and stays on. They are measured by
experiments; nothing predicts them."""


@dataclass(slots=True)
class _StepCounts:
    """Counts of sessions over the verdicts of a step."""

    num_joining: int = 0
    """Sessions that take part in the decision."""
    num_drafted: int = 0
    """Sessions with draft tokens of any source."""
    num_on: int = 0
    """Sessions whose plan uses the model."""
    has_exploration: bool = False


@dataclass(slots=True)
class ModeController:
    """The mode of all sessions under one controller, and what the next decision is made from."""

    mode: Mode | None = None
    """None: nothing was decided yet."""
    calibrated_speedup: float = MIN_SPEEDUP
    """Tokens per second with the model, as a multiple of plain decoding."""
    experiments: Experiments = field(default_factory=Experiments)
    observer: Observer | None = None
    """Receives decisions; experiments report to it themselves."""
    plan: Plan | None = None
    """Plan of all sessions that speculate, if there are several; each has its own share of it."""
    num_changes: int = 0
    """Changes of mode or plan so far."""
    sample: Sequence[SessionStats] = ()
    """Some of the sessions of the last mean."""
    _num_rounds: int = 0
    """Rounds since the last decision."""
    _sessions: dict[int, SessionStats] = field(default_factory=dict)
    """Sessions that had a round since then, by identity."""
    _last: SessionStats | None = None
    _num_running: int = 0
    """Sessions at the last decision."""
    _predicted: dict[Mode, float] = field(default_factory=dict)
    """Predicted speedups of the last decision."""
    _is_experiment_due: bool = False
    _num_steps: int = FIRST_DECISION_STEPS
    """Steps for which the last decision holds."""
    _step: _StepCounts = field(default_factory=_StepCounts)
    _num_unsettled: int = 0

    @property
    def uses_model(self) -> bool | None:
        """Sessions have plans with the model, decided or tried; None: nothing was decided yet."""
        return None if self.mode is None else Mode.MODEL in (self.mode, self.experiments.tried)

    @property
    def is_plain(self) -> bool:
        """No session has draft tokens now, not even of the n-gram fallback."""
        tried = self.experiments.tried
        return (self.mode if tried is None else tried) is Mode.PLAIN

    @property
    def is_trying_plain(self) -> bool:
        """An experiment sets plans aside for a few steps."""
        return self.experiments.tried is Mode.PLAIN

    @property
    def is_trying_model(self) -> bool:
        """An experiment uses the model for a few steps."""
        return self.experiments.tried is Mode.MODEL

    def add(self, stats: SessionStats, *, is_drafted: bool = False) -> None:
        """Takes a round of a session; ``is_drafted``: with draft tokens of any source."""
        self._num_rounds += 1
        self._sessions[id(stats)] = stats
        step = self._step
        step.num_joining += 1
        step.num_drafted += is_drafted
        step.num_on += stats.plan is not None and not stats.plan.is_off
        if stats.is_exploring:
            step.has_exploration = True
            # Something was measured: decide soon.
            self._num_steps = min(self._num_steps, DECISION_STEPS)

    def end_step(
        self,
        seconds: float | None,
        *,
        is_reading: bool = False,
        num_sessions: int,
        num_running: int,
        num_tokens: int,
    ) -> None:
        """Takes a step whose verdicts are all there.

        Args:
            seconds: since the end of the step before; None: it shows nothing of speculation.
            is_reading: the draft has prefilled meanwhile, as it must of every prompt while it is used.
            num_sessions: of the step.
            num_running: sessions, in the step or waiting for the next.
            num_tokens: that were committed.
        """
        step, self._step = self._step, _StepCounts()
        if self.mode is None:
            return
        is_seen = seconds is not None and seconds > 0 and self._is_alike(step, num_sessions)
        if is_reading and (self._num_unsettled or self.experiments.tried is not None or not self.uses_model):
            # It catches up with what it was not sent before.
            is_seen = False
        if is_seen and self._num_unsettled:
            self._num_unsettled -= 1
            is_seen = False
        if seconds is None or not is_seen:
            has_changed = self.experiments.pass_by()
        else:
            tried = self.experiments.tried
            mode = self.mode if tried is None else tried
            has_changed = self.experiments.observe(mode, num_running, num_tokens, seconds)
        if has_changed:
            self._change()
            # The result is weighed with the next round.
            self._num_steps = 0 if self.experiments.running is None else self._num_steps
        elif self._num_running and size_class(num_running) == size_class(self._num_running):
            # Decisions are rare where little changes, and a burst may be over before the next one.
            self._is_experiment_due = self.experiments.is_due(self.mode, self._predicted, num_running)

    def _is_alike(self, step: _StepCounts, num_sessions: int) -> bool:
        if step.num_joining == 0 or step.num_joining < num_sessions or step.has_exploration:
            return False
        if self.is_plain:
            return step.num_drafted == 0
        if self.uses_model:
            # With fewer, the draft is not there, or has yet to read.
            return step.num_on == step.num_joining <= 2 * step.num_drafted
        return step.num_on == 0

    def _change(self) -> None:
        self.num_changes += 1
        # They count for neither mode: the draft catches up with what it has missed.
        self._num_unsettled = 2

    def is_due(self, num_running: int) -> bool:
        """A decision is due."""
        if self.mode is None or self._is_experiment_due or self._is_another(num_running):
            return True
        return self.experiments.running is None and self._num_rounds >= self._num_steps * num_running

    def take_mean(self, new: SessionStats) -> SessionStats:
        """The mean of sessions since the last call; ``new`` if none ever had a round. Begins a new mean."""
        if self._sessions:
            sessions = list(self._sessions.values())
            self._last = mean_of(sessions)
            self.sample = sessions[:: -(-len(sessions) // 8)]
            self._sessions.clear()
            self._num_rounds = 0
        return self._last or new

    def decide(self, predicted_speedup: float, num_running: int) -> None:
        """Chooses the mode.

        Args:
            predicted_speedup: of the model over plain decoding, before calibration.
        """
        predicted = self._predicted = {Mode.NGRAM: 1.0, Mode.MODEL: predicted_speedup}
        calibrated = self.experiments.calibrated(predicted, num_running)
        self.calibrated_speedup = calibrated[Mode.MODEL]
        mode = self._choose(calibrated)
        is_change = mode is not self.mode
        is_another = self._is_another(num_running)
        if is_change:
            self.experiments.switch_to(mode, num_running)
        elif is_another:
            self.experiments.abandon()
        tried = self.experiments.begin(mode, predicted, num_running)
        most = DECISION_STEPS if mode is Mode.MODEL else OFF_DECISION_STEPS
        if is_change or is_another:
            self._num_steps = FIRST_DECISION_STEPS
        else:
            growth = 2 if mode is Mode.MODEL else 4
            self._num_steps = min(most, growth * max(1, self._num_steps))
        self.mode, self._num_running, self._is_experiment_due = mode, num_running, False
        if is_change or tried is not None:
            self._change()
        if self.observer is not None:
            self.observer.decided(
                mode,
                tried,
                predicted_speedup=predicted_speedup,
                calibrated_speedup=self.calibrated_speedup,
                num_running=num_running,
            )

    def _choose(self, calibrated: Mapping[Mode, float]) -> Mode:
        """The fastest mode; the current one is left only for one that is a little faster."""
        now = Mode.NGRAM if self.mode is None else self.mode
        ngram, model = calibrated[Mode.NGRAM], calibrated[Mode.MODEL]
        takes_ngram = ngram >= (NGRAM_MIN_SPEEDUP if now is Mode.PLAIN else NGRAM_KEEP_SPEEDUP)
        if model >= (KEEP_SPEEDUP if now is Mode.MODEL else MIN_SPEEDUP):
            margin = NGRAM_MIN_SPEEDUP if now is Mode.MODEL else 1 / NGRAM_MIN_SPEEDUP
            return Mode.NGRAM if takes_ngram and ngram > margin * model else Mode.MODEL
        return Mode.NGRAM if takes_ngram else Mode.PLAIN

    def reopen(self) -> None:
        """Engines work in another way from now on: all decide anew, and re-plan."""
        self.experiments.abandon()
        self.mode, self.plan = None, None
        self._change()

    def set_plan(self, plan: Plan | None) -> None:
        """Sets the plan of all sessions that speculate; None: each chooses its own."""
        self.num_changes += plan != self.plan
        self.plan = plan

    def _is_another(self, num_running: int) -> bool:
        """Half as many sessions run as at the last decision, or twice as many."""
        return not self._num_running < 2 * num_running < 4 * self._num_running
