"""Running averages of what was measured: step times by rows, acceptance, hit rates."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from operator import itemgetter

_NUM_WARMUP = 5
_WEIGHT = 0.1
_MAX_JUMP = 3.0
_EXACT_ROWS = 64
_NUM_TRUSTED = 3
_BUCKET_ROWS = 32
_GROWTH = 4
_LEAST_SHARE = 0.5
"""Of what was expected, however much less other sizes took than expected of them."""


class Average:
    """A running average that starts with the least of its first samples, since warm-up only slows down.

    Later samples count for at most three times the average: one hiccup must not change a plan. So does the
    first one where something was expected, which stands until then.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def expect(self, value: float) -> None:
        """What to believe before the first measurement."""
        if self.count == 0:
            self.value = value

    def add(self, sample: float) -> None:
        """Takes one measurement."""
        self.count += 1
        if self.value is None:
            self.value = sample
        elif self.count == 1:
            self.value = min(sample, _MAX_JUMP * self.value)
        elif self.count <= _NUM_WARMUP:
            self.value = min(self.value, sample)
        else:
            self.value += _WEIGHT * (min(sample, _MAX_JUMP * self.value) - self.value)


class TimeTable:
    """Seconds of a step by its size. Unknown sizes are interpolated; outside of what is known, flat.

    Flat is optimistic upwards, so a larger size is tried once it looks worth it, and then it is measured. The
    first step of a size costs several times the later ones (kernels are chosen, memory is touched), so one
    sample says nothing: sizes with fewer than three are left aside while there are others. Otherwise a size
    that was slow once would never be tried again.

    What was *expected* of a size stands until the size is trusted. What trusted sizes took beyond what had
    been expected of them (transport, a busy machine) is added to what is expected of the others.
    """

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._expected: dict[int, float] = {}
        self._trusted: list[int] = []
        self._points: _Curve | None = None

    def __bool__(self) -> bool:
        """True once something was measured."""
        return bool(self._averages)

    def expect(self, seconds_by_size: Mapping[int, float]) -> None:
        """Replaces what is expected of steps that were not measured yet."""
        self._expected = {_bucket(size): seconds for size, seconds in seconds_by_size.items()}
        self._points = None

    def add(self, size: int, seconds: float) -> None:
        """Takes one measurement of a step of ``size`` rows."""
        bucket = _bucket(size)
        average = self._averages.get(bucket)
        if average is None:
            average = self._averages[bucket] = Average()
        average.add(seconds)
        if average.count == _NUM_TRUSTED:
            insort(self._trusted, bucket)
        self._points = None

    def predict(self, size: int) -> float | None:
        """Seconds of a step of ``size`` rows; None when nothing is known."""
        if self._points is None:
            self._points = self._curve()
        return _interpolate(self._points, _bucket(size)) if self._points else None

    def least(self, size: int) -> float | None:
        """As ``predict``, but no more than larger sizes took: such a sample was disturbed."""
        predicted = self.predict(size)
        if predicted is None:
            return None
        bucket = _bucket(size)
        return min([predicted, *(seconds for other, seconds in self._all() if other >= bucket)])

    def largest_within(self, seconds: float) -> int:
        """The largest size that is believed to take no longer than ``seconds``; 0: none.

        A known size vouches for all smaller ones. Beyond the largest one, _GROWTH times as much is tried.
        """
        known = self._all()
        for index in range(len(known) - 1, -1, -1):
            size, value = known[index]
            if value > seconds:
                continue
            if index == len(known) - 1:
                return _GROWTH * size
            larger, more = known[index + 1]
            share = (seconds - value) / (more - value)
            return size + int(share * (larger - size))
        return 0

    def _curve(self) -> _Curve:
        """What predictions are made from: trusted sizes, else expected ones, else whatever was measured."""
        if not self._trusted and not self._expected:
            return self._all()
        trusted = [(size, self._value(size)) for size in self._trusted]
        if not self._expected:
            return trusted
        expected = sorted(self._expected.items())
        beyond = [(size, value - _interpolate(expected, size)) for size, value in trusted] or [(0, 0.0)]
        known = {
            size: max(_LEAST_SHARE * seconds, seconds + _interpolate(beyond, size))
            for size, seconds in expected
        }
        return sorted((known | dict(trusted)).items())

    def _all(self) -> _Curve:
        """Every size of which anything is known; a measurement, even a single one, before an expectation."""
        known = dict(self._curve()) if self._expected else {}
        return sorted((known | {size: self._value(size) for size in self._averages}).items())

    def _value(self, size: int) -> float:
        value = self._averages[size].value
        assert value is not None, "an average is made for its first sample"
        return value


_Curve = list[tuple[int, float]]
"""(size, seconds) pairs by increasing size."""


def _interpolate(curve: _Curve, size: int) -> float:
    """Between the two neighbours of ``size``; flat outside."""
    index = bisect_left(curve, size, key=itemgetter(0))
    if index == len(curve):
        return curve[-1][1]
    upper_size, upper = curve[index]
    if upper_size == size or index == 0:
        return upper
    lower_size, lower = curve[index - 1]
    return lower + (size - lower_size) / (upper_size - lower_size) * (upper - lower)


def _bucket(size: int) -> int:
    return size if size <= _EXACT_ROWS else -(-size // _BUCKET_ROWS) * _BUCKET_ROWS


class OutcomesTime:
    """Seconds that the draft needs for outcomes.

    In draft steps: one per token, one for the ranking, and for every branch of a step some share of one more.
    The share is what is learnt, so one measurement tells of all numbers of tokens and branches.
    """

    _PRIOR_SHARE = 0.1
    _LEAST_SHARE = 0.01

    def __init__(self) -> None:
        self._share = Average()

    def add(self, num_tokens: int, num_branches: int, seconds: float, *, step_s: float) -> None:
        """Takes the time of branches of ``num_tokens``, given that a step of one line takes ``step_s``."""
        if num_tokens > 0 and num_branches > 0 and step_s > 0:
            excess = seconds / step_s - (num_tokens + 1)
            self._share.add(max(self._LEAST_SHARE, excess / (num_tokens * num_branches)))

    def expect(self, step_s: Sequence[tuple[int, float]]) -> None:
        """Sets the share that stands before the first measurement, from steps of several lines.

        Args:
            step_s: (lines, seconds of a step) pairs, that of one line first.
        """
        if len(step_s) < 2:
            return
        (_, first), *others = step_s
        shares = [(seconds / first - 1) / num_lines for num_lines, seconds in others]
        self._share.expect(max(self._LEAST_SHARE, sum(shares) / len(shares)))

    def predict(self, num_tokens: int, num_branches: int, *, step_s: float) -> float:
        """Seconds of ``num_branches`` branches of ``num_tokens`` each."""
        share = self._PRIOR_SHARE if self._share.value is None else self._share.value
        return step_s * (num_tokens + 1 + share * num_tokens * num_branches)


class Rate:
    """A probability with a prior: ``(successes + prior * weight) / (trials + weight)``, old trials fading."""

    __slots__ = ("_prior", "_successes", "_trials", "_weight")

    _FADING = 0.98

    def __init__(self, prior: float, weight: float = 8.0) -> None:
        self._prior = prior
        self._weight = weight
        self._successes = 0.0
        self._trials = 0.0

    @property
    def value(self) -> float:
        """In (0, 1)."""
        return (self._successes + self._prior * self._weight) / (self._trials + self._weight)

    def add(self, successes: int, trials: int) -> None:
        """Takes the trials of one round."""
        self._successes = self._successes * self._FADING + successes
        self._trials = self._trials * self._FADING + trials


def chain_trials(num_drafts: int, num_accepted: int) -> int:
    """Independent acceptance tests that one round made: those passed, and the one that failed, if any."""
    return num_accepted + (num_accepted < num_drafts)
