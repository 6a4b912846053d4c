"""Running averages of what was measured: step times by rows, acceptance, hit rates."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from operator import itemgetter

_NUM_WARMUP = 5
_WEIGHT = 0.1
_MAX_JUMP = 3.0
_MAX_SETTLING_JUMP = 1.5
_EXACT_ROWS = 64
_NUM_TRUSTED = 3
_BUCKET_ROWS = 32
_GROWTH = 4
_BRANCH_SHARE = 0.5
"""Of what a further sequence costs, a further branch: it shares the context of its sequence."""
_REACH = 4
"""What a size took against what was expected of it tells of sizes up to so many times larger or smaller."""
_FOLLOWING = 0.05
"""Share of what a step is off by, in logarithms, that is its size's own; less than the machine's."""
_MAX_DRIFT = 0.01
"""Predictions may be so much older than the averages: the curve is not drawn again for each step."""
_PACE_WEIGHT = 0.3
"""The machine's share: one that others use is slow for tenths of a second at a time."""


class Average:
    """A running average that starts with the least of its first samples, since warm-up only slows down.

    From there it soon reaches their mean. A sample counts for at most a few times the average: one hiccup
    must not change a plan. So does the first one where something was expected, which stands until then.
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
            weight = 1 / (self.count - _NUM_WARMUP + 2)
            jump = _MAX_JUMP if weight <= _WEIGHT else _MAX_SETTLING_JUMP
            self.value += max(_WEIGHT, weight) * (min(sample, jump * self.value) - self.value)

    def follow(self, ratio: float) -> None:
        """Takes a sample that is so many times what was expected, for reasons that may lie elsewhere."""
        assert self.value is not None, "there is something to follow from"
        self.count += 1
        self.value *= ratio ** max(_FOLLOWING, 1 / (self.count - _NUM_WARMUP + 2))


class TimeTable:
    """Seconds of a step by its size. Unknown sizes are interpolated; smaller ones than any known cost as much
    as the smallest, larger ones grow as the known ones do from the smallest to the largest.

    That is optimistic upwards, so a larger size is tried once it looks worth it, and then measured. The
    first step of a size costs several times the later ones (kernels are chosen, memory is touched), so one
    sample says nothing: sizes with fewer than three are left aside while there are others. Otherwise a size
    that was slow once would never be tried again. Nor does a size take longer than a larger one: where they
    say so, both are believed to take what they do on average (isotonic regression).

    What was *expected* of a size stands until the size is trusted. By as much as trusted sizes took more or
    less than had been expected of them, others near them are expected to take. What they took more may be so
    many times as much (a busy machine) or so much more (a step's messages, and what is done for each of its
    sequences): the less of both is expected, since what looks too dear is never tried.

    Samples are divided by the *pace*, how much longer steps take now than their averages say, and predictions
    are multiplied by it. Sizes come at different times, and what is compared are sizes: without it, plain
    decoding looked slow for as long as the machine was, and what had been measured before fast. Pace and
    average take fixed shares of the logarithm of what a sample is off by: so neither wanders at the other's
    cost while one size comes alone, which would change how that size compares with the others.
    """

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._expected: _Curve = []
        self._trusted: list[int] = []
        self.pace = 1.0
        self._points: _Curve | None = None
        self._drift = 0.0
        """Of the averages since the points were made from them, in shares."""

    def __bool__(self) -> bool:
        """True once something was measured."""
        return bool(self._averages)

    def expect(self, seconds_by_size: Mapping[int, float]) -> None:
        """Replaces what is expected of steps that were not measured yet.

        Beyond the largest size, up to _GROWTH times as much, steps are expected to go on growing as they did
        since half that size: of two sizes near each other, neither is known well enough to say.
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
            ratio = max(1 / _MAX_JUMP, min(_MAX_JUMP, seconds / (average.value * self.pace)))
            self.pace *= ratio**_PACE_WEIGHT
            before = average.value
            average.follow(ratio)
            self._drift += abs(average.value / before - 1.0)
            if self._drift <= _MAX_DRIFT:
                return
        else:
            average.add(seconds / self.pace)
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
            return self.pace * _interpolate(self._points, size_of(size))
        return self.pace * (more + max(0.0, more - less) / (last - first) * (size - last))

    def least(self, size: int) -> float | None:
        """As ``predict``, but no more than larger sizes took: such a sample was disturbed."""
        predicted = self.predict(size)
        if predicted is None:
            return None
        bucket = size_of(size)
        return min([predicted, *(self.pace * seconds for other, seconds in self._all() if other >= bucket)])

    def largest_within(self, seconds: float) -> int:
        """The largest size that is believed to take no longer than ``seconds``; 0: none.

        A known size vouches for all smaller ones. Beyond the largest one, _GROWTH times as much is tried.
        """
        known, seconds = self._all(), seconds / self.pace
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
        trusted = _ascending([(size, self._value(size)) for size in self._trusted])
        if not self._expected:
            return trusted
        expected = [(size, value, _interpolate(self._expected, size)) for size, value in trusted]
        factors = [(size, value / seconds) for size, value, seconds in expected]
        more = [(size, max(0.0, value - seconds)) for size, value, seconds in expected]
        known = {
            size: min(seconds * _near(factors, size, 1.0), seconds + _near(more, size, 0.0))
            for size, seconds in self._expected
        }
        return _raised(sorted((known | dict(trusted)).items()), dict(trusted))

    def _all(self) -> _Curve:
        """Every size of which anything is known; a measurement, even a single one, before an expectation.

        No row takes longer for being one of more: what is not trusted is at most as much per row as the next
        smaller trusted size. Otherwise one disturbed step of a size would keep larger ones from being tried.
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


def _ascending(curve: _Curve) -> _Curve:
    """The nearest curve that never falls: neighbours that do are pooled (Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []
    for _, seconds in curve:
        total, count = seconds, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            before, number = pools.pop()
            total, count = total + before, count + number
        pools.append((total, count))
    means = (total / count for total, count in pools for _ in range(count))
    return [(size, mean) for (size, _), mean in zip(curve, means, strict=True)]


def _raised(curve: _Curve, trusted: Mapping[int, float]) -> _Curve:
    """What is only expected takes no less than smaller trusted sizes took, and no more than larger ones."""
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


def _near(values: _Curve, size: int, otherwise: float) -> float:
    """Between those of sizes within _REACH; ``otherwise`` without any."""
    first = bisect_left(values, size / _REACH, key=itemgetter(0))
    last = bisect_right(values, _REACH * size, key=itemgetter(0))
    return _interpolate(values[first:last], size) if first < last else otherwise


def size_of(size: int) -> int:
    """Under which a number of rows is kept."""
    return size if size <= _EXACT_ROWS else -(-size // _BUCKET_ROWS) * _BUCKET_ROWS


class OutcomesTime:
    """Seconds that the draft needs for outcomes: a step for the ranking, then one per token for all branches.

    What a step costs by the number of its branches is expected; how much more or less outcomes of about so
    many branches take than that is learnt, and believed of others until they are measured.
    """

    _PRIOR_SHARE = 0.05
    """A further branch, as part of a step of one line."""

    def __init__(self) -> None:
        self._widths: _Curve = [(1, 1.0), (2, 1.0 + self._PRIOR_SHARE)]
        self._factors: dict[int, Average] = {}

    def add(self, num_tokens: int, num_branches: int, seconds: float, *, step_s: float) -> None:
        """Takes the time of branches of ``num_tokens``, given that a step of one line takes ``step_s``."""
        if num_tokens > 0 and num_branches > 0 and step_s > 0:
            factor = self._factors.setdefault(num_branches.bit_length(), Average())
            factor.add(seconds / (step_s * self._num_steps(num_tokens, num_branches)))

    def expect(self, step_s: Sequence[tuple[int, float]]) -> None:
        """Sets what a step costs.

        Args:
            step_s: (sequences, seconds of a step) pairs, that of one first.
        """
        if len(step_s) >= 2:
            first = step_s[0][1]
            self._widths = [(lines, 1 + _BRANCH_SHARE * (seconds / first - 1)) for lines, seconds in step_s]

    def predict(self, num_tokens: int, num_branches: int, *, step_s: float) -> float:
        """Seconds of ``num_branches`` branches of ``num_tokens`` each."""
        return step_s * self._num_steps(num_tokens, num_branches) * self._factor(num_branches)

    def relax(self, share: float) -> None:
        """Doubts by a share that outcomes are dearer than expected: what is not chosen is never measured."""
        for factor in self._factors.values():
            if factor.value is not None and factor.value > 1.0:
                factor.value += share * (1.0 - factor.value)

    def _num_steps(self, num_tokens: int, num_branches: int) -> float:
        """In steps of one line."""
        last = self._widths[-1]
        if num_branches <= last[0]:
            return 1 + num_tokens * _interpolate(self._widths, num_branches)
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
    """A share of trials, or a number per trial, with a prior; old trials fade.

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
        """Of a share: in (0, 1)."""
        return (self._successes + self._prior * self._weight) / (self._trials + self._weight)

    def relax(self, share: float) -> None:
        """Forgets a share of the trials: what is not chosen is not tried again."""
        self._successes *= 1.0 - share
        self._trials *= 1.0 - share

    def add(self, successes: int, trials: int) -> None:
        """Takes the trials of one round."""
        self._successes = self._successes * self._fading + successes
        self._trials = self._trials * self._fading + trials


def chain_trials(num_drafts: int, num_accepted: int) -> int:
    """Independent acceptance tests that one round made: those passed, and the one that failed, if any."""
    return num_accepted + (num_accepted < num_drafts)
