"""What speculation really brings, seen in short trials beside what it was promised to bring.

Predictions know both engines' steps. What else a round takes, they do not: the router's own work, others on
the same machine, an engine that is slower beside a busy one, caches that the other has emptied. So now and
then all sessions work for a few steps in another way, and their tokens per second are held against those of
the steps before and after: in turns, since a machine's own speed changes from second to second. From then on
promises are believed as far as such promises were kept.

A trial costs what the worse way loses in a few steps. So the next one is twice as far away each time, until
all that trials cost is a small share of the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Level(IntEnum):
    """How much all sessions speculate, at most."""

    PLAIN = 0
    """One token a step."""
    FILLERS = 1
    """With draft tokens that need no model."""
    MODEL = 2
    """With the draft model's too."""


PLAIN_STEPS = 8
"""Of a trial, without speculation: each brings one token of each session."""
SPECULATED_ROUNDS = 64
"""Of a trial, of all sessions: what a round brings is left to chance."""
FIRST_INTERVAL_STEPS, LARGE_GAIN_INTERVAL_STEPS = 16, 256
"""Until the first trial, and where a trial would lose most of its time; the next one is twice as far away."""
MAX_TRIAL_SHARE = 0.005
"""Of the time, at most, for what the worse of both ways loses: trials become no rarer than that asks for."""
PLAIN_INTERVAL_STEPS, MAX_INTERVAL_STEPS = 256, 8192
"""From plain decoding, at least; at most."""
LARGE_GAIN = 2.0
_PRIOR_TRIALS = 0.25
"""So much is a promise worth, beside trials."""
_MEMORY_TRIALS = 8.0
_MAX_SURPRISE = 3.0
"""A step counts as no more than so many times an ordinary one: something else disturbed it."""
_MAX_ERROR = math.log(8.0)
_HALF_STALE_STEPS = 2048
"""What was seen so long ago, and not tried again since, is believed by half."""
_PATIENCE = 6
"""A trial that took so many times its steps, with those that show nothing, is given up."""


@dataclass(slots=True)
class Window:
    """The last steps of one way of working, at most ``num_steps``."""

    num_steps: int
    _steps: deque[tuple[float, float]] = field(default_factory=deque)
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """One step, and what it brought."""
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
        """0 when nothing is in it."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


@dataclass(slots=True)
class Trial:
    """One way of working between two windows of another; one of both is plain decoding."""

    base: Level
    level: Level
    """That is tried."""
    promised: float
    """By the one that speculates, as a multiple of plain decoding."""
    before: Window
    during: Window
    after: Window
    num_left: int
    """Steps that show nothing, until it is given up."""

    @property
    def contender(self) -> Level:
        """The one that speculates."""
        return max(self.base, self.level)

    @property
    def gain(self) -> float | None:
        """Of the one that speculates over the other; None: nothing came of it."""
        bases = [window.tokens_per_s for window in (self.before, self.after)]
        tried = self.during.tokens_per_s
        if min(*bases, tried) <= 0:
            return None
        ratio = tried / math.sqrt(bases[0] * bases[1])
        return ratio if self.level is self.contender else 1 / ratio


@dataclass(slots=True)
class _Kept:
    """Promises of one level, with about so many sessions."""

    weight: float = 0.0
    """Trials, of which old ones count for less."""
    error: float = 0.0
    """Mean logarithm of what they brought over what was promised."""
    interval: int = 0
    """Steps until the next trial; 0: there was none yet."""
    since: int = 0
    """Step of the last one, of those that were counted."""
    num_elsewhere: int = 0
    """Steps since then at another level."""

    def add(self, gain: float, promised: float) -> None:
        error = max(-_MAX_ERROR, min(_MAX_ERROR, math.log(gain / promised)))
        self.weight = min(self.weight, _MEMORY_TRIALS - 1) + 1
        self.error += (error - self.error) / self.weight

    @property
    def factor(self) -> float:
        """Of what is promised now."""
        weight = self._weight
        return math.exp(self.error * weight / (weight + _PRIOR_TRIALS))

    def put_off(self, num_steps: int, interval: int) -> None:
        """From that step on, the next trial is so many steps away."""
        self.weight, self.num_elsewhere = self._weight, 0
        self.since, self.interval = num_steps, interval

    @property
    def _weight(self) -> float:
        # What is at work is tried again. What is not may have become better, which nothing tells.
        return float(self.weight * 0.5 ** (self.num_elsewhere / _HALF_STALE_STEPS))


class Trials:
    """Holds promises against what came, by level and by the number of sessions, in powers of two.

    Args:
        on_end: told of each trial that ends, and of the gain that it showed; None: given up, it showed none.

    Attributes:
        running: the trial that goes on; None: there is none.
    """

    def __init__(self, on_end: Callable[[Trial, float | None], None] | None = None) -> None:
        self.running: Trial | None = None
        self._on_end = on_end
        self._kept: dict[tuple[Level, int], _Kept] = {}
        self._num_steps = 0
        self._size = 0
        self._level: Level | None = None
        self._window = Window(0)

    @property
    def tried(self) -> Level | None:
        """What is tried now instead of what was decided."""
        trial = self.running
        return None if trial is None or trial.during.is_full else trial.level

    def believed(self, promised: Mapping[Level, float], num_running: int) -> dict[Level, float]:
        """The promises, as multiples of plain decoding, as far as such ones were kept."""
        return {level: gain * self._of(level, num_running).factor for level, gain in promised.items()}

    def observe(self, level: Level, num_running: int, tokens: float, seconds: float) -> bool:
        """Takes a step in which all sessions worked alike.

        Args:
            level: at which they did.
            num_running: sessions, >= 1.
            tokens: that all committed.
            seconds: since the end of the step before; more than 0.

        Returns:
            True: ``tried`` has changed, or a trial has ended.
        """
        self._num_steps += 1
        for contender in (Level.FILLERS, Level.MODEL):
            if contender is not level:
                self._of(contender, num_running).num_elsewhere += 1
        trial, size = self.running, size_of(num_running)
        # Sessions end and others follow: for a few steps there are fewer, which shows nothing of them all.
        tokens /= num_running
        if trial is None:
            if (level, size) != (self._level, self._size):
                self._level, self._size = level, size
                self._window = Window(num_steps_of(level, num_running))
            self._window.add(tokens, seconds)
            return False
        if size != self._size:
            return self.pass_by()
        if not trial.during.is_full:
            trial.during.add(tokens, seconds)
            return trial.during.is_full
        trial.after.add(tokens, seconds)
        if not trial.after.is_full:
            return False
        self._end(trial)
        return True

    def pass_by(self) -> bool:
        """A step that shows nothing. True: the trial waited for too long and was given up."""
        trial = self.running
        if trial is None:
            return False
        trial.num_left -= 1
        if trial.num_left > 0:
            return False
        self.abandon()
        return True

    def take_up(self, level: Level, num_running: int) -> None:
        """All turn to that level: whether it keeps what it promises is seen soon."""
        self.abandon()
        self._of(level, num_running).put_off(self._num_steps, 0)

    def abandon(self) -> None:
        """Ends the trial without a result; the next one is as far away as this one was."""
        trial = self.running
        if trial is not None:
            kept = self._kept[trial.contender, self._size]
            kept.put_off(self._num_steps, kept.interval)
            self._tell(trial, None)
        self.running = None
        self._level = None

    def is_due(self, level: Level, promised: Mapping[Level, float], num_running: int) -> bool:
        """``begin`` would begin a trial."""
        return self._due(level, promised, num_running) is not None

    def begin(self, level: Level, promised: Mapping[Level, float], num_running: int) -> Level | None:
        """Begins a trial beside ``level`` when one is due.

        Args:
            level: that was decided for.
            promised: by those that speculate, over plain decoding.

        Returns:
            What is tried from now on; None: nothing.
        """
        contender = self._due(level, promised, num_running)
        if contender is None:
            return None
        tried = Level.PLAIN if level is contender else contender
        sizes = [num_steps_of(one, num_running) for one in (tried, level)]
        self.running = Trial(
            level,
            tried,
            promised[contender],
            self._window,
            Window(sizes[0]),
            Window(sizes[1]),
            num_left=_PATIENCE * sum(sizes),
        )
        return tried

    def _due(self, level: Level, promised: Mapping[Level, float], num_running: int) -> Level | None:
        """What speculates in the trial that may begin now; None: none may."""
        if self.running is not None or self._level is not level or not self._window.is_full:
            return None
        if size_of(num_running) != self._size:
            return None
        if level is not Level.PLAIN:
            contenders: list[Level] = [level]
        else:
            # What promises less than nothing is looked at when it promises more.
            contenders = [other for other, gain in promised.items() if gain >= 1.0]
        return next(
            (other for other in contenders if self._is_due(other, level, promised, num_running)), None
        )

    def _is_due(
        self, contender: Level, level: Level, promised: Mapping[Level, float], num_running: int
    ) -> bool:
        kept = self._of(contender, num_running)
        # As it was seen last: what is believed since then is better, for want of trials.
        gain = promised[contender] * math.exp(kept.error)
        tried = Level.PLAIN if level is contender else contender
        lost_share = 1 - 1 / gain if level is contender else 1 / gain - 1
        num_lost = num_steps_of(tried, num_running) * max(0.0, lost_share)
        affordable = min(MAX_INTERVAL_STEPS, num_lost / MAX_TRIAL_SHARE)
        if level is Level.PLAIN:
            interval = max(PLAIN_INTERVAL_STEPS, affordable)
        else:
            interval = min(
                kept.interval or first_interval(promised[contender]), max(FIRST_INTERVAL_STEPS, affordable)
            )
        return self._num_steps - kept.since >= interval

    def _end(self, trial: Trial) -> None:
        self._put_off(trial)
        gain = trial.gain
        if gain is not None:
            self._kept[trial.contender, self._size].add(gain, trial.promised)
        self._tell(trial, gain)
        self.running = None

    def _tell(self, trial: Trial, gain: float | None) -> None:
        if self._on_end is not None:
            self._on_end(trial, gain)

    def _put_off(self, trial: Trial) -> None:
        kept = self._kept[trial.contender, self._size]
        interval = 2 * max(kept.interval, first_interval(trial.promised))
        kept.put_off(self._num_steps, min(MAX_INTERVAL_STEPS, interval))

    def _of(self, level: Level, num_running: int) -> _Kept:
        key = level, size_of(num_running)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(since=self._num_steps)
        return kept


def first_interval(promised: float) -> int:
    """Steps until the first trial of what promises so much."""
    return LARGE_GAIN_INTERVAL_STEPS if promised >= LARGE_GAIN else FIRST_INTERVAL_STEPS


def size_of(num_running: int) -> int:
    """Numbers of sessions that are alike: up to about half as many again, or two thirds."""
    return round(math.log2(num_running))


def num_steps_of(level: Level, num_running: int) -> int:
    """Of a window at that level."""
    return PLAIN_STEPS if level is Level.PLAIN else max(PLAIN_STEPS, -(-SPECULATED_ROUNDS // num_running))
