"""Running averages of what was measured: step times by rows, acceptance, hit rates."""

from __future__ import annotations

from bisect import bisect_left, insort

_NUM_WARMUP = 5
_WEIGHT = 0.1
_MAX_JUMP = 3.0
_EXACT_ROWS = 64
_NUM_TRUSTED = 3
_BUCKET_ROWS = 32
_GROWTH = 4


class Average:
    """A running average that starts with the least of its first samples, since warm-up only slows down.

    Later samples count for at most three times the average: one hiccup must not change a plan.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def add(self, sample: float) -> None:
        """Takes one measurement."""
        self.count += 1
        if self.value is None:
            self.value = sample
        elif self.count <= _NUM_WARMUP:
            self.value = min(self.value, sample)
        else:
            self.value += _WEIGHT * (min(sample, _MAX_JUMP * self.value) - self.value)


class TimeTable:
    """Seconds of a step by its size. Unknown sizes are interpolated; outside of what was measured, flat.

    Flat is optimistic upwards, so a larger size is tried once it looks worth it, and then it is measured. The
    first step of a size costs several times the later ones (kernels are chosen, memory is touched), so one
    sample says nothing: sizes with fewer than three are left aside while there are others. Otherwise a size
    that was slow once would never be tried again.
    """

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._sizes: list[int] = []
        self._trusted: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def add(self, size: int, seconds: float) -> None:
        """Takes one measurement of a step of ``size`` rows."""
        bucket = _bucket(size)
        average = self._averages.get(bucket)
        if average is None:
            average = self._averages[bucket] = Average()
            insort(self._sizes, bucket)
        average.add(seconds)
        if average.count == _NUM_TRUSTED:
            insort(self._trusted, bucket)

    def predict(self, size: int) -> float | None:
        """Seconds of a step of ``size`` rows; None before the first measurement."""
        sizes = self._trusted or self._sizes
        if not sizes:
            return None
        bucket = _bucket(size)
        index = bisect_left(sizes, bucket)
        if index == len(sizes):
            return self._averages[sizes[-1]].value
        upper = self._averages[sizes[index]].value
        if sizes[index] == bucket or index == 0:
            return upper
        lower = self._averages[sizes[index - 1]].value
        assert lower is not None and upper is not None
        share = (bucket - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return lower + share * (upper - lower)

    def least(self, size: int) -> float | None:
        """As ``predict``, but no more than larger sizes took: such a sample was disturbed."""
        predicted = self.predict(size)
        if predicted is None:
            return None
        larger = self._sizes[bisect_left(self._sizes, _bucket(size)) :]
        return min([predicted, *(self._value(other) for other in larger)])

    def largest_within(self, seconds: float) -> int:
        """The largest size that is believed to take no longer than ``seconds``; 0: none.

        A measured size vouches for all smaller ones. Beyond the largest one, _GROWTH times as much is tried.
        """
        for index in range(len(self._sizes) - 1, -1, -1):
            size = self._sizes[index]
            value = self._value(size)
            if value > seconds:
                continue
            if index == len(self._sizes) - 1:
                return _GROWTH * size
            larger = self._sizes[index + 1]
            share = (seconds - value) / (self._value(larger) - value)
            return size + int(share * (larger - size))
        return 0

    def _value(self, size: int) -> float:
        value = self._averages[size].value
        assert value is not None, "an average is made for its first sample"
        return value


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
