"""The advice: predicted tokens per second, a ranking by them, and what would change it. Measures nothing.

Every prediction is ``GoodputModel.serial_goodput``, by which the service chooses K, with what was measured of
the candidate: tokens and draft tokens per round, and both engines' step times in service. What drafts without
a model is a draft whose steps take no time; what drafts in the target's steps has made those longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import Final

from specray.bench.advise.candidate import Candidate, without_draft
from specray.bench.advise.figures import Likeness, Times
from specray.bench.methods.method import ALL
from specray.config import Config, parse_config
from specray.control.cost_model import CostModel
from specray.control.expectations import ExpectedRound
from specray.control.goodput import GoodputModel

REACH: Final = 4
"""Batch up to which step times are extrapolated, as a multiple of the largest measured one."""


@dataclass(frozen=True, slots=True)
class Measured:
    candidate: Candidate
    likenesses: tuple[Likeness, ...]
    """Agreement by temperature, domain and K."""
    rejection: tuple[Likeness, ...]
    """The same under rejection sampling, where that differs from coupled; all prompts together."""
    times: Times

    def at(self, temperature: float, domain: str = ALL) -> list[Likeness]:
        return [one for one in self.likenesses if (one.temperature, one.domain) == (temperature, domain)]


@dataclass(frozen=True, slots=True)
class Prediction:
    concurrency: int
    k: int
    tau: float
    tokens_per_s: float
    """Tokens per second of one request."""
    speedup: float
    """Multiple of plain decoding's tokens per second at the same concurrency."""
    is_extrapolated: bool
    """No step times of so many sequences were measured."""


@dataclass(frozen=True, slots=True)
class Change:
    """What would make a candidate the best, each change alone; None: the change cannot."""

    draft_factor: float | None
    """Largest factor of the draft's step times with which it would be."""
    rejections: float | None
    """Largest share of its rejections that could be left."""
    acceptance: float | None
    """Its acceptance then."""


@dataclass(frozen=True, slots=True)
class RankedEntry:
    measured: Measured
    predictions: tuple[Prediction, ...]
    """Predicted throughput by concurrency."""
    stops_paying: int | None
    """Least batch at which no K is predicted to gain anything; None: there is none up to the limit."""
    latency_ratio: float | None
    """Seconds of a draft step over those of a target step, of one sequence; None: it takes no draft steps."""
    change: Change | None
    """What would make it the best; None: it is."""

    @property
    def name(self) -> str:
        return self.measured.candidate.name

    @property
    def first(self) -> Prediction:
        return self.predictions[0]


@dataclass(frozen=True, slots=True)
class Advice:
    temperature: float
    """Temperature of the ranking."""
    concurrencies: tuple[int, ...]
    """Concurrencies of the predictions; the ranking is by the first."""
    largest_batch: int
    """Largest batch for which ``stops_paying`` was looked for."""
    plain: Times
    entries: tuple[RankedEntry, ...]

    @property
    def winner(self) -> RankedEntry | None:
        """The best candidate; None: none gains anything."""
        best = self.entries[0]
        return best if best.first.speedup > 1.0 else None

    def serving_config(self, target: Config) -> Config:
        """The configuration that serves the winner, or the target alone. Raises ConfigError."""
        if self.winner is not None:
            return parse_config(self.winner.measured.candidate.serving_values())
        return without_draft(target)


def advise(
    measured: Sequence[Measured],
    plain: Times,
    *,
    temperature: float,
    concurrencies: Sequence[int],
    most_sequences: int,
) -> Advice:
    """Ranks the candidates.

    Args:
        measured: at least one, each with likenesses at the temperature.
        plain: step times of plain decoding.
        temperature: of the ranking.
        concurrencies: for which to predict; the ranking is by the first.
        most_sequences: that the target takes at a time.
    """
    largest = min(most_sequences, REACH * plain.most_sequences)
    predictors = [_Predictor(one, plain, temperature) for one in measured]
    by_candidate = [tuple(one.best(count) for count in concurrencies) for one in predictors]
    best = max(found[0].tokens_per_s for found in by_candidate)
    entries = [
        RankedEntry(
            one.measured,
            found,
            one.stops_paying(largest),
            one.latency_ratio,
            None if found[0].tokens_per_s == best else one.change(concurrencies[0], best),
        )
        for one, found in zip(predictors, by_candidate, strict=True)
    ]
    entries.sort(key=lambda entry: -entry.first.tokens_per_s)
    return Advice(temperature, tuple(concurrencies), largest, plain, tuple(entries))


class _Predictor:
    def __init__(self, measured: Measured, plain: Times, temperature: float) -> None:
        self.measured = measured
        self._likenesses = measured.at(temperature)
        self._plain = self._goodput(plain.cost_model())
        self._plain_times = plain
        self._cost = measured.times.cost_model()

    @property
    def latency_ratio(self) -> float | None:
        if not self.measured.times.has_draft_steps:
            return None
        return self._cost.draft_step_s(1, 0.0) * self._plain.plain_goodput(1)

    def best(self, concurrency: int) -> Prediction:
        """The K with the most tokens per second."""
        found = {one.k: self._tokens_per_s(self._cost, one, concurrency, 1.0) for one in self._likenesses}
        k = max(found, key=lambda key: found[key])
        return Prediction(
            concurrency,
            k,
            next(one.tokens_per_round for one in self._likenesses if one.k == k),
            found[k],
            found[k] / self._plain.plain_goodput(concurrency),
            concurrency > min(self._plain_times.most_sequences, self.measured.times.most_sequences),
        )

    def stops_paying(self, largest: int) -> int | None:
        return next((count for count in range(1, largest + 1) if self.best(count).speedup <= 1.0), None)

    def change(self, concurrency: int, wanted: float) -> Change:
        """What would bring it to the wanted tokens per second."""

        def with_draft(factor: float) -> bool:
            cost = self.measured.times.cost_model(draft_factor=factor)
            return self._most(cost, concurrency, 1.0) >= wanted

        def with_rejections(share: float) -> bool:
            return self._most(self._cost, concurrency, share) >= wanted

        factor = _largest(with_draft) if self.measured.times.has_draft_steps else None
        rejections = _largest(with_rejections)
        acceptance = fmean(one.acceptance for one in self._likenesses)
        return Change(factor, rejections, None if rejections is None else 1 - rejections * (1 - acceptance))

    def _most(self, cost: CostModel, concurrency: int, rejections: float) -> float:
        return max(self._tokens_per_s(cost, one, concurrency, rejections) for one in self._likenesses)

    def _tokens_per_s(self, cost: CostModel, one: Likeness, concurrency: int, rejections: float) -> float:
        expected = ExpectedRound(one.drafts_per_round, one.tau_with(rejections), 1.0)
        width = self._width(one.k)
        return self._goodput(cost).serial_goodput(one.k, [expected], concurrency, width=width)

    def _width(self, k: int) -> float:
        """Rows of a proposal in a draft step, on average: a step continues the nodes of one depth."""
        budget = self.measured.candidate.method().budget
        if budget is None:
            return 1.0
        if not budget.widths:
            return max(1.0, budget.num_nodes / k)
        return fmean((1, *accumulate(budget.widths[: k - 1], mul)))

    def _goodput(self, cost: CostModel) -> GoodputModel:
        config = self.measured.candidate.config.speculation
        return GoodputModel(config, self.measured.candidate.kind.value, cost)


def _largest(suffices: Callable[[float], bool]) -> float | None:
    """Largest share in [0, 1] that suffices, where all smaller ones do; None: none does."""
    if not suffices(0.0):
        return None
    low, high = 0.0, 1.0
    # Halvings in the search for what would change the ranking.
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if suffices(middle) else (low, middle)
    return low
