"""Estimators of what is measured: an average, a table of step times by rows, a rate."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from operator import itemgetter

_NUM_WARMUP = 5
"""Samples of which an average takes the least: warm-up only slows down."""
_WEIGHT = 0.1
"""Weight of a sample in a settled average."""
_MAX_JUMP = 3.0
"""Largest sample that a settled average takes, as a multiple of it."""
_EXACT_ROWS = 64
"""Largest size with an average of its own; larger sizes share buckets."""
_BUCKET_ROWS = 32
"""Rows per bucket of larger sizes."""
_NUM_TRUSTED = 3
"""Samples from which on a size's average is trusted."""
_GROWTH = 4
"""Extrapolation limit, as a multiple of the largest known size."""
_REACH = 4
"""Ratio of sizes up to which a measured size corrects the expectation of another."""
_OWN_SHARE = 0.05
"""Share of the log residual credited to this size's average."""
_LOAD_SHARE = 0.3
"""Share of the log residual credited to the machine's load, which changes within tenths of a second."""
_MAX_DRIFT = 0.01
"""Relative change of the averages up to which the cached curve is still used."""


class Average:
    """Running average that starts from the least of its first samples and then approaches their mean.

    A sample is cut to a few times the average: one hiccup must not change a plan. So is the first sample
    where a value was expected.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def expect(self, value: float) -> None:
        """Sets the value before the first measurement."""
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
            weight = 1 / (self.count - _NUM_WARMUP + 2)
            jump = _MAX_JUMP if weight <= _WEIGHT else 1.5
            self.value += max(_WEIGHT, weight) * (min(sample, jump * self.value) - self.value)

    def follow(self, ratio: float) -> None:
        """Adds a measured/expected ratio, damped: other causes may explain most of it."""
        assert self.value is not None, "there is something to follow from"
        self.count += 1
        self.value *= ratio ** max(_OWN_SHARE, 1 / (self.count - _NUM_WARMUP + 2))


class TimeTable:
    """Seconds of a step by its size in rows: averages, interpolated; never falling with the size.

    Sizes below the smallest known one cost as much as it does; above the largest, the slope from the smallest
    to the largest goes on. That is optimistic, so a larger size is tried once it looks worth it, and then
    measured. The first step of a size takes several times the later ones (kernels are chosen, memory is
    touched), so sizes with fewer than three samples are ignored while there are others: otherwise a size that
    was slow once would never be tried again. Where a size's average exceeds a larger one's, both are pooled
    (isotonic regression).

    An *expected* time of a size holds until the size is trusted. Trusted sizes correct the expectation of
    sizes near them, by the ratio (a busy machine) or by the difference (messages, and work per sequence)
    between measured and expected time: the smaller correction of both, since a size that looks too expensive
    is never tried.

    Samples are divided by ``load_factor``, the time that steps take now over what their averages say, and
    predictions are multiplied by it. Sizes are measured at different times and compared with each other:
    without the factor, plain decoding looked slow while the machine was, and sizes measured before it fast.
    Load factor and average take fixed shares of the log residual of a sample. So neither drifts at the
    other's cost while only one size is measured, which would distort that size against the others.
    """

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._expected: _Curve = []
        self._trusted: list[int] = []
        self.load_factor = 1.0
        self._points: _Curve | None = None
        self._drift = 0.0
        """Relative change of the averages since ``_points`` was made from them."""

    def __bool__(self) -> bool:
        """True once something was measured."""
        return bool(self._averages)

    def expect(self, seconds_by_size: Mapping[int, float]) -> None:
        """Replaces the expected times of sizes that were not measured yet.

        From the largest size up to _GROWTH times it, times are expected to grow with the slope since half
        that size: two neighbouring sizes are not known well enough for a slope.
        """
        known = ((size_of(size), seconds) for size, seconds in seconds_by_size.items())
        self._expected = sorted({size: seconds for size, seconds in known if seconds > 0}.items())
        if len(self._expected) > 1:
            last, more = self._expected[-1]
            half = bisect_right(self._expected, last / 2, key=itemgetter(0)) - 1
            size, less = self._expected[max(0, half)]
            slope, end = max(0.0, more - less) / (last - size), size_of(_GROWTH * last)
            self._expected.append((end, more + slope * (end - last)))
        self._points = None

    def add(self, size: int, seconds: float) -> None:
        """Takes one measurement of a step of ``size`` rows."""
        bucket = size_of(size)
        # Large steps cost by the row: a bucket's average must not be that of its smallest ones.
        seconds *= bucket / size
        average = self._averages.get(bucket)
        if average is None:
            average = self._averages[bucket] = Average()
        if average.count > _NUM_WARMUP and average.value and seconds > 0:
            ratio = max(1 / _MAX_JUMP, min(_MAX_JUMP, seconds / (average.value * self.load_factor)))
            self.load_factor *= ratio**_LOAD_SHARE
            before = average.value
            average.follow(ratio)
            self._drift += abs(average.value / before - 1.0)
            if self._drift <= _MAX_DRIFT:
                return
        else:
            average.add(seconds / self.load_factor)
        if average.count == _NUM_TRUSTED:
            insort(self._trusted, bucket)
        self._points = None

    def predict(self, size: int) -> float | None:
        """Seconds of a step of ``size`` rows; None when nothing is known."""
        if self._points is None:
            self._points = self._curve()
            self._drift = 0.0
        if not self._points:
            return None
        (first, less), (last, more) = self._points[0], self._points[-1]
        if size <= last or first == last:
            return self.load_factor * interpolate(self._points, size_of(size))
        return self.load_factor * (more + max(0.0, more - less) / (last - first) * (size - last))

    def least(self, size: int) -> float | None:
        """Returns ``predict``, but at most what larger sizes took: a longer sample was disturbed."""
        predicted = self.predict(size)
        if predicted is None:
            return None
        bucket = size_of(size)
        return min(
            [predicted, *(self.load_factor * seconds for other, seconds in self._all() if other >= bucket)]
        )

    def largest_within(self, seconds: float) -> int:
        """Largest size predicted to take at most ``seconds``; 0: none.

        A known size that fits vouches for all smaller ones. Beyond the largest, _GROWTH times it is tried.
        """
        known, seconds = self._all(), seconds / self.load_factor
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
        """Points to predict from: trusted sizes, else expected ones, else whatever was measured."""
        if not self._trusted and not self._expected:
            return self._all()
        rising = isotonic([(self._value(size), 1.0) for size in self._trusted])
        trusted = list(zip(self._trusted, rising, strict=True))
        if not self._expected:
            return trusted
        expected = [(size, value, interpolate(self._expected, size)) for size, value in trusted]
        factors = [(size, value / seconds) for size, value, seconds in expected]
        more = [(size, max(0.0, value - seconds)) for size, value, seconds in expected]
        known = {
            size: min(seconds * _near(factors, size, 1.0), seconds + _near(more, size, 0.0))
            for size, seconds in self._expected
        }
        return _raised(sorted((known | dict(trusted)).items()), dict(trusted))

    def _all(self) -> _Curve:
        """Points of all known sizes; a measurement, even a single one, replaces an expectation.

        An untrusted size costs per row at most what the next smaller trusted size does: otherwise one
        disturbed step would keep larger sizes from being tried.
        """
        known = dict(self._curve()) if self._expected else {}
        known |= {size: self._value(size) for size in self._averages}
        return sorted((size, self._bounded(size, seconds)) for size, seconds in known.items())

    def _bounded(self, size: int, seconds: float) -> float:
        index = bisect_left(self._trusted, size)
        if index == 0 or (index < len(self._trusted) and self._trusted[index] == size):
            return seconds
        trusted = self._trusted[index - 1]
        return min(seconds, self._value(trusted) * size / trusted)

    def _value(self, size: int) -> float:
        value = self._averages[size].value
        assert value is not None, "an average is made for its first sample"
        return value


_Curve = list[tuple[int, float]]
"""(size, seconds) pairs by increasing size."""


def isotonic(values: Sequence[tuple[float, float]]) -> list[float]:
    """Isotonic regression of (value, weight) pairs: neighbours that fall are pooled (Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in values:
        total, mass, count = value * weight, weight, 1
        while pools and pools[-1][0] * mass >= total * pools[-1][1]:
            before, more, number = pools.pop()
            total, mass, count = total + before, mass + more, count + number
        pools.append((total, mass, count))
    return [total / mass for total, mass, count in pools for _ in range(count)]


def _raised(curve: _Curve, trusted: Mapping[int, float]) -> _Curve:
    """Bounds expected sizes by the trusted sizes below and above them."""
    raised: _Curve = []
    least = 0.0
    for size, seconds in curve:
        least = trusted.get(size, least)
        raised.append((size, max(least, seconds)))
    most = math.inf
    for index in range(len(raised) - 1, -1, -1):
        size, seconds = raised[index]
        most = trusted.get(size, most)
        raised[index] = size, min(most, seconds)
    return raised


def interpolate(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the value between the two neighbours of ``size``; flat outside."""
    index = bisect_left(curve, size, key=itemgetter(0))
    if index == len(curve):
        return curve[-1][1]
    upper_size, upper = curve[index]
    if upper_size == size or index == 0:
        return upper
    lower_size, lower = curve[index - 1]
    return lower + (size - lower_size) / (upper_size - lower_size) * (upper - lower)


def _near(values: _Curve, size: int, otherwise: float) -> float:
    """Interpolates values of sizes within _REACH; ``otherwise`` if there are none."""
    first = bisect_left(values, size / _REACH, key=itemgetter(0))
    last = bisect_right(values, _REACH * size, key=itemgetter(0))
    return interpolate(values[first:last], size) if first < last else otherwise


def size_of(size: int) -> int:
    """Bucket of a number of rows, named by its largest."""
    return size if size <= _EXACT_ROWS else -(-size // _BUCKET_ROWS) * _BUCKET_ROWS


class OutcomesTime:
    """Seconds of the draft for outcomes: a step for the ranking, then one per token for all branches.

    The cost of a step by its branches is expected; a correction is learnt by the (rounded) number of
    branches, and used for other numbers until they are measured.
    """

    _PRIOR_SHARE = 0.05
    """Cost of a further branch as a share of a step of one sequence, before the draft says its own."""

    def __init__(self) -> None:
        self._widths: _Curve = [(1, 1.0), (2, 1.0 + self._PRIOR_SHARE)]
        self._factors: dict[int, Average] = {}

    def add(self, num_tokens: int, num_branches: int, seconds: float, *, step_s: float) -> None:
        """Takes the time of branches of ``num_tokens``, given the seconds of a step of one sequence."""
        if num_tokens > 0 and num_branches > 0 and step_s > 0:
            factor = self._factors.setdefault(num_branches.bit_length(), Average())
            factor.add(seconds / (step_s * self._num_steps(num_tokens, num_branches)))

    def expect(self, step_s: Sequence[tuple[int, float]]) -> None:
        """Sets the expected cost of a step.

        Args:
            step_s: (sequences, seconds of a step) pairs, that of one first.
        """
        if len(step_s) >= 2:
            first = step_s[0][1]
            self._widths = [(lines, 1 + 0.5 * (seconds / first - 1)) for lines, seconds in step_s]

    def predict(self, num_tokens: int, num_branches: int, *, step_s: float) -> float:
        """Seconds of ``num_branches`` branches of ``num_tokens`` each."""
        return step_s * self._num_steps(num_tokens, num_branches) * self._factor(num_branches)

    def decay(self, share: float) -> None:
        """Takes back a share of corrections above 1, since outcomes not chosen are not measured again."""
        for factor in self._factors.values():
            if factor.value is not None and factor.value > 1.0:
                factor.value += share * (1.0 - factor.value)

    def _num_steps(self, num_tokens: int, num_branches: int) -> float:
        """Cost in steps of one sequence."""
        last = self._widths[-1]
        if num_branches <= last[0]:
            return 1 + num_tokens * interpolate(self._widths, num_branches)
        before = self._widths[-2]
        slope = max(0.0, (last[1] - before[1]) / (last[0] - before[0]))
        return 1 + num_tokens * (last[1] + slope * (num_branches - last[0]))

    def _factor(self, num_branches: int) -> float:
        if not self._factors:
            return 1.0
        size = num_branches.bit_length()
        value = self._factors[min(self._factors, key=lambda other: abs(other - size))].value
        assert value is not None, "an average is made for its first sample"
        return value


class Rate:
    """Share of trials that succeeded, or a number per trial, with a prior; old trials fade.

    ``(successes + prior * weight) / (trials + weight)``.
    """

    __slots__ = ("_fading", "_prior", "_successes", "_trials", "_weight")

    def __init__(self, prior: float, weight: float = 8.0, *, fading: float = 0.98) -> None:
        self._prior = prior
        self._weight = weight
        self._fading = fading
        self._successes = 0.0
        self._trials = 0.0

    @property
    def value(self) -> float:
        """Estimate; of a share in (0, 1)."""
        return (self._successes + self._prior * self._weight) / (self._trials + self._weight)

    def decay(self, share: float) -> None:
        """Forgets a share of the trials, so that the estimate returns towards its prior."""
        self._successes *= 1.0 - share
        self._trials *= 1.0 - share

    def add(self, successes: int, trials: int) -> None:
        """Takes the trials of one round."""
        self._successes = self._successes * self._fading + successes
        self._trials = self._trials * self._fading + trials


def chain_trials(num_drafts: int, num_accepted: int) -> int:
    """Acceptance tests of one round: those passed, and the one that failed, if any."""
    return num_accepted + (num_accepted < num_drafts)
