"""Figures of measurements: percentiles, and sums over the outputs of an arm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from specray.bench.core.turns import ratios
from specray.requests import OutputChunk, SpeculationStats


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one kind of duration, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int


def percentile(values: Sequence[float], q: float) -> float:
    """Returns the q-th percentile (0..100), linear between neighbours, as numpy does by default."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Returns the percentiles; None without values."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, q) for q in (50, 90, 99))
    return Percentiles(p50, p90, p99, sum(values) / len(values), len(values))


def gaps_ms(times_s: Sequence[float]) -> list[float]:
    """Milliseconds between neighbouring times in seconds."""
    return [1e3 * (later - earlier) for earlier, later in pairwise(times_s)]


@dataclass(slots=True)
class Tally:
    """Sums over the outputs of one arm."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each turn."""
    num_tokens: list[int] = field(default_factory=list)
    """Output tokens of each turn."""
    draft_s: float = 0.0
    """Seconds of the draft model's steps."""
    num_rounds: int = 0
    num_spec_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    """Rounds with draft tokens by the number that was accepted."""
    num_equal: int = 0
    """Outputs that are plain decoding's."""
    num_outputs: int = 0

    @classmethod
    def of(cls, output: OutputChunk, *, is_equal: bool) -> Tally:
        """One output without times."""
        tally = cls()
        tally.begin_turn()
        tally.add_output(output, seconds=0.0, is_equal=is_equal)
        return tally

    def begin_turn(self) -> None:
        self.seconds.append(0.0)
        self.num_tokens.append(0)

    def add_output(
        self, output: OutputChunk, *, seconds: float, is_equal: bool, draft_s: float = 0.0
    ) -> None:
        """Adds the last chunk of a whole output to the current turn."""
        assert output.stats is not None, "the last chunk has them"
        num_tokens = len(output.token_ids)
        self.add(output.stats, num_tokens=num_tokens, seconds=seconds, draft_s=draft_s, is_equal=is_equal)

    def add(
        self,
        stats: SpeculationStats,
        *,
        num_tokens: int,
        seconds: float = 0.0,
        draft_s: float = 0.0,
        is_equal: bool = True,
    ) -> None:
        """Adds an output to the current turn."""
        self.seconds[-1] += seconds
        self.num_tokens[-1] += num_tokens
        self.draft_s += draft_s
        self.num_rounds += num_tokens - stats.num_accepted_draft_tokens
        self.num_equal += is_equal
        self.num_outputs += 1
        self._count(
            stats.num_spec_steps,
            stats.num_draft_tokens,
            stats.num_accepted_draft_tokens,
            stats.acceptance_histogram,
        )

    @classmethod
    def merged(cls, tallies: Iterable[Tally]) -> Tally:
        """All of some tallies, in one turn."""
        total = cls()
        total.begin_turn()
        for one in tallies:
            total.seconds[0] += sum(one.seconds)
            total.num_tokens[0] += sum(one.num_tokens)
            total.draft_s += one.draft_s
            total.num_rounds += one.num_rounds
            total.num_equal += one.num_equal
            total.num_outputs += one.num_outputs
            total._count(one.num_spec_steps, one.num_drafts, one.num_accepted, one.histogram)
        return total

    def _count(
        self, num_spec_steps: int, num_drafts: int, num_accepted: int, histogram: Sequence[int]
    ) -> None:
        self.num_spec_steps += num_spec_steps
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for index, count in enumerate(histogram):
            self.histogram[index] += count

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by turn."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)]

    @property
    def tokens_per_s(self) -> float:
        """Median over the turns."""
        return median(self.rates)

    @property
    def tokens_per_round(self) -> float:
        """Output tokens per step of the target."""
        return sum(self.num_tokens) / self.num_rounds

    def speedups(self, plain: Tally) -> list[float]:
        """Tokens per second over those of plain decoding in the same turn."""
        return ratios(self.rates, plain.rates)

    @property
    def by_depth(self) -> tuple[float, ...]:
        """P(one more draft token is accepted | n were), from n = 0 on."""
        return tuple(more / here for here, more in pairwise(self._reached) if here)

    @property
    def acceptance(self) -> float:
        """Accepted over tested draft tokens: those up to the first rejected one of each round."""
        num_tests = sum(self._reached[:-1])
        return self.num_accepted / num_tests if num_tests else 0.0

    @property
    def _reached(self) -> list[int]:
        """Rounds in which at least n draft tokens were accepted, by n."""
        return [sum(self.histogram[count:]) for count in range(len(self.histogram))]
