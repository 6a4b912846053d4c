"""Experiments that measure what predictions cannot know: A/B windows of all sessions, and exploration.

Predictions know both engines' steps, but not what else a round takes: the router's own work, others on the
same machine, an engine that is slower next to a busy one, caches that the other has emptied. So now and then
all sessions work in another mode for a few steps (a switchback experiment), and their tokens per second are
compared with those of the steps before and after, since a machine's speed changes from second to second. The
ratio of measured to predicted speedup calibrates later predictions.

An experiment costs what the slower mode loses in a few steps. So intervals double until experiments cost a
small share of the time. While speculation is off, one session explores it for two rounds: what the draft is
worth is measured again, and an experiment follows if it promises enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specray.control.state import Mode, Observer

PLAIN_STEPS = 8
"""Steps of a window of plain decoding: each brings one token of each session."""
SPECULATED_ROUNDS = 64
"""Session-rounds per window with speculation; acceptance is noisy."""
FIRST_INTERVAL_STEPS = 8
"""Steps until the first experiment: what engines say of themselves may be wrong by a factor."""
MAX_EXPERIMENT_SHARE = 0.005
"""Largest share of the time that the slower modes of experiments may lose."""
PLAIN_INTERVAL_STEPS, MAX_INTERVAL_STEPS = 256, 8192
"""Minimum interval in steps while plain; maximum interval."""
_MAX_SURPRISE = 3.0
"""Longest step that a window takes, as a multiple of its average step: something else disturbed it."""
_MAX_ERROR = math.log(8.0)
"""Largest log ratio of measured to predicted speedup."""
_HALF_LIFE_STEPS = 2048
"""Steps at another mode after which a calibration weighs half."""
EXPLORATION_INTERVAL_ROUNDS = 256
"""Rounds between explorations while speculation is off."""
EXPLORATION_ROUNDS = 2
"""Rounds of an exploration: half a percent of the time where speculation costs half. One of several sessions
explores for all: they all wait for its draft, which must read the session's whole text first."""
MAX_EXPLORATION_SHARE = 0.005
"""Largest share of the time that the draft may read before explorations."""


@dataclass(slots=True)
class StepWindow:
    """The last steps at one mode, at most ``num_steps``."""

    num_steps: int
    _steps: deque[tuple[float, float]] = field(default_factory=deque)
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Takes a step and the tokens that it committed."""
        if self._steps:
            seconds = min(seconds, _MAX_SURPRISE * self._seconds / len(self._steps))
        self._steps.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds
        if len(self._steps) > self.num_steps:
            tokens, seconds = self._steps.popleft()
            self._tokens -= tokens
            self._seconds -= seconds

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self.num_steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 for an empty window."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


@dataclass(slots=True)
class Experiment:
    """A window at one mode between two windows at another; one of both is plain decoding."""

    base: Mode
    """Mode that was decided for."""
    tried: Mode
    predicted_speedup: float
    """Predicted tokens per second of the speculating mode, as a multiple of plain decoding."""
    before: StepWindow
    during: StepWindow
    after: StepWindow
    num_left: int
    """Steps that may still show nothing, until it is given up."""

    @property
    def speculating(self) -> Mode:
        """The mode of both that speculates."""
        return max(self.base, self.tried)

    @property
    def measured_speedup(self) -> float | None:
        """Measured tokens per second of the speculating mode over the other's; None: a window brought no
        token."""
        bases = [window.tokens_per_s for window in (self.before, self.after)]
        tried = self.during.tokens_per_s
        if min(*bases, tried) <= 0:
            return None
        ratio = tried / math.sqrt(bases[0] * bases[1])
        return ratio if self.tried is self.speculating else 1 / ratio


@dataclass(slots=True)
class _Calibration:
    """What experiments have shown of one mode with sessions of one size class, and when the next is due."""

    weight: float = 0.0
    """Number of experiments; old ones count for less."""
    error: float = 0.0
    """Mean log ratio of measured to predicted speedup."""
    interval: int = 0
    """Steps from the last experiment to the next; 0: there was none yet."""
    since: int = 0
    """Number of the step at which the last one ended."""
    num_elsewhere: int = 0
    """Steps since then at another mode."""

    def add(self, measured: float, predicted: float) -> None:
        error = max(-_MAX_ERROR, min(_MAX_ERROR, math.log(measured / predicted)))
        # The mean of some eight experiments.
        self.weight = min(self.weight, 7.0) + 1
        self.error += (error - self.error) / self.weight

    @property
    def factor(self) -> float:
        """Factor of a predicted speedup now."""
        weight = self._weight
        # A prediction counts as a quarter of an experiment.
        return math.exp(self.error * weight / (weight + 0.25))

    def put_off(self, num_steps: int, interval: int) -> None:
        """Counts from step ``num_steps`` on; the next experiment is ``interval`` steps away."""
        self.weight, self.num_elsewhere = self._weight, 0
        self.since, self.interval = num_steps, interval

    @property
    def _weight(self) -> float:
        # The mode at work is measured again. Another may have become better, which nothing shows.
        return float(self.weight * 0.5 ** (self.num_elsewhere / _HALF_LIFE_STEPS))


class Experiments:
    """Runs one experiment at a time, and calibrates predictions by mode and number of sessions.

    Attributes:
        running: the experiment that goes on; None: there is none.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.running: Experiment | None = None
        self._observer = observer
        self._calibrations: dict[tuple[Mode, int], _Calibration] = {}
        self.num_steps = 0
        self._size = 0
        self._mode: Mode | None = None
        self._window = StepWindow(0)

    @property
    def tried(self) -> Mode | None:
        """Mode that is tried now instead of the decided one; None: the decided one holds."""
        experiment = self.running
        return None if experiment is None or experiment.during.is_full else experiment.tried

    def calibrated(self, predicted: Mapping[Mode, float], num_running: int) -> dict[Mode, float]:
        """Predicted speedups over plain decoding, corrected by what experiments have shown."""
        return {mode: value * self.calibration(mode, num_running).factor for mode, value in predicted.items()}

    def observe(self, mode: Mode, num_running: int, tokens: float, seconds: float) -> bool:
        """Takes a step in which all sessions worked at one mode.

        Args:
            mode: at which they did.
            num_running: sessions, >= 1.
            tokens: that all committed.
            seconds: since the end of the step before; more than 0.

        Returns:
            True: ``tried`` has changed, or an experiment has ended.
        """
        self.num_steps += 1
        for other in (Mode.NGRAM, Mode.MODEL):
            if other is not mode:
                self.calibration(other, num_running).num_elsewhere += 1
        experiment, size = self.running, size_class(num_running)
        # Sessions end and others follow: for a few steps there are fewer, which shows nothing of them all.
        tokens /= num_running
        if experiment is None:
            if (mode, size) != (self._mode, self._size):
                self._mode, self._size = mode, size
                self._window = StepWindow(num_window_steps(mode, num_running))
            self._window.add(tokens, seconds)
            return False
        if size != self._size:
            return self.pass_by()
        if not experiment.during.is_full:
            experiment.during.add(tokens, seconds)
            return experiment.during.is_full
        experiment.after.add(tokens, seconds)
        if not experiment.after.is_full:
            return False
        self._end(experiment)
        return True

    def pass_by(self) -> bool:
        """Takes a step that shows nothing. True: the experiment waited for too long and was given up."""
        experiment = self.running
        if experiment is None:
            return False
        experiment.num_left -= 1
        if experiment.num_left > 0:
            return False
        self.abandon()
        return True

    def switch_to(self, mode: Mode, num_running: int) -> None:
        """All sessions switch to that mode: an experiment soon shows whether it keeps its prediction."""
        self.abandon()
        self.calibration(mode, num_running).put_off(self.num_steps, 0)

    def abandon(self) -> None:
        """Ends the experiment without a result; the next one is as far away as this one was."""
        experiment = self.running
        if experiment is not None:
            calibration = self._calibrations[experiment.speculating, self._size]
            calibration.put_off(self.num_steps, calibration.interval)
            self._tell(experiment, None)
        self.running = None
        self._mode = None

    def is_due(self, mode: Mode, predicted: Mapping[Mode, float], num_running: int) -> bool:
        """``begin`` would begin an experiment."""
        return self._due(mode, predicted, num_running) is not None

    def begin(self, mode: Mode, predicted: Mapping[Mode, float], num_running: int) -> Mode | None:
        """Begins an experiment against ``mode`` if one is due.

        Args:
            mode: that was decided for.
            predicted: speedups of the speculating modes over plain decoding.

        Returns:
            The mode that is tried from now on; None: none is.
        """
        speculating = self._due(mode, predicted, num_running)
        if speculating is None:
            return None
        tried = Mode.PLAIN if mode is speculating else speculating
        sizes = [num_window_steps(one, num_running) for one in (tried, mode)]
        self.running = Experiment(
            mode,
            tried,
            predicted[speculating],
            self._window,
            StepWindow(sizes[0]),
            StepWindow(sizes[1]),
            num_left=6 * sum(sizes),
        )
        return tried

    def _due(self, mode: Mode, predicted: Mapping[Mode, float], num_running: int) -> Mode | None:
        """The speculating mode of the experiment that may begin now; None: none may."""
        if self.running is not None or self._mode is not mode or not self._window.is_full:
            return None
        if size_class(num_running) != self._size:
            return None
        if mode is not Mode.PLAIN:
            candidates: list[Mode] = [mode]
        else:
            # A mode predicted to be slower is tried once it is predicted to be faster.
            candidates = [other for other, speedup in predicted.items() if speedup >= 1.0]
        return next(
            (other for other in candidates if self._is_due(other, mode, predicted, num_running)), None
        )

    def _is_due(
        self, speculating: Mode, mode: Mode, predicted: Mapping[Mode, float], num_running: int
    ) -> bool:
        calibration = self.calibration(speculating, num_running)
        # As measured last: calibrations that fade towards 1 since then do so for want of experiments.
        speedup = predicted[speculating] * math.exp(calibration.error)
        tried = Mode.PLAIN if mode is speculating else speculating
        lost_share = 1 - 1 / speedup if mode is speculating else 1 / speedup - 1
        num_lost = num_window_steps(tried, num_running) * max(0.0, lost_share)
        affordable = min(MAX_INTERVAL_STEPS, num_lost / MAX_EXPERIMENT_SHARE)
        if mode is Mode.PLAIN:
            interval = max(PLAIN_INTERVAL_STEPS, affordable)
        else:
            interval = min(
                calibration.interval or FIRST_INTERVAL_STEPS,
                max(FIRST_INTERVAL_STEPS, affordable),
            )
        return self.num_steps - calibration.since >= interval

    def _end(self, experiment: Experiment) -> None:
        calibration = self._calibrations[experiment.speculating, self._size]
        interval = 2 * max(calibration.interval, FIRST_INTERVAL_STEPS)
        calibration.put_off(self.num_steps, min(MAX_INTERVAL_STEPS, interval))
        measured = experiment.measured_speedup
        if measured is not None:
            calibration.add(measured, experiment.predicted_speedup)
        self._tell(experiment, measured)
        self.running = None

    def _tell(self, experiment: Experiment, measured_speedup: float | None) -> None:
        if self._observer is not None:
            self._observer.experiment_ended(
                base=experiment.base,
                tried=experiment.tried,
                speculating=experiment.speculating,
                predicted_speedup=experiment.predicted_speedup,
                measured_speedup=measured_speedup,
            )

    def calibration(self, mode: Mode, num_running: int) -> _Calibration:
        key = mode, size_class(num_running)
        calibration = self._calibrations.get(key)
        if calibration is None:
            calibration = self._calibrations[key] = _Calibration(since=self.num_steps)
        return calibration


@dataclass(slots=True)
class Exploration:
    """Decides when a session tries a draft model that is off, so that what has changed since is measured."""

    _rounds_unused: int = 0
    """Rounds of all sessions since one had draft tokens under a plan that was no exploration."""
    _rounds_unexplored: int = 0
    """Rounds of all sessions since one began to explore."""

    def add(self, *, is_used: bool) -> None:
        """Takes a round of a session; ``is_used``: with draft tokens, and not as an exploration."""
        self._rounds_unexplored += 1
        self._rounds_unused = 0 if is_used else self._rounds_unused + 1

    def begin(self) -> None:
        """A session explores."""
        self._rounds_unexplored = 0

    def is_due(self, rounds_off: int, *, num_running: int, num_prefill_steps: Callable[[], float]) -> bool:
        """A session without speculation should try it.

        Args:
            rounds_off: of this session, since it had draft tokens.
            num_running: sessions that share the steps.
            num_prefill_steps: target steps in the time in which the draft reads what it was not sent of the
                session; called only where that decides.
        """
        if self._rounds_unused < num_running:
            # All wait for the draft anyway.
            return rounds_off >= EXPLORATION_INTERVAL_ROUNDS
        num_rounds = min(self._rounds_unused, self._rounds_unexplored)
        if num_rounds < EXPLORATION_INTERVAL_ROUNDS * num_running:
            return False
        return num_rounds >= round(num_prefill_steps() / MAX_EXPLORATION_SHARE) * num_running


def size_class(num_running: int) -> int:
    """Class of numbers of sessions that are alike: up to about half as many again, or two thirds."""
    return round(math.log2(num_running))


def num_window_steps(mode: Mode, num_running: int) -> int:
    return PLAIN_STEPS if mode is Mode.PLAIN else max(PLAIN_STEPS, -(-SPECULATED_ROUNDS // num_running))
