"""Results of a simulated run, and the SLO that they are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Slo:
    """The latencies that a request must meet, and the share of requests that must."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Limit of a request's mean inter-token latency in milliseconds."""
    share: float = 0.95


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A measured window in virtual seconds; what comes before it is warm-up."""

    warmup_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request. Seconds are virtual."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_s: float | None = None
    """Time in seconds at which its first token reached the router; None: refused, or not served in time."""
    ended_s: float | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that its target found in its cache."""
    token_ids: tuple[int, ...] = ()
    """Its output."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between its tokens; None where there is none."""
        if self.first_s is None or self.ended_s is None or self.num_output_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.num_output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """True if the request has finished, and as fast as it must."""
        if self.ended_s is None or self.ttft_s is None:
            return False
        is_soon = slo.ttft_ms is None or 1e3 * self.ttft_s <= slo.ttft_ms
        itl_s = self.itl_s
        return is_soon and (slo.itl_ms is None or itl_s is None or 1e3 * itl_s <= slo.itl_ms)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in milliseconds."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """Results of a fleet under a load, in its measured window."""

    num_groups: int
    num_drafts: int
    window_s: float
    offered_tokens_per_s: float
    """Output tokens/s that the window's requests ask for."""
    tokens_per_s: float
    """Output tokens/s that were committed in the window."""
    goodput_tokens_per_s: float
    """Output tokens/s of requests that met the SLO."""
    num_requests: int
    num_met: int
    num_refused: int
    ttft_ms: Spread | None
    itl_ms: Spread | None
    """Milliseconds between commits, shared among the tokens of the later one, as in the service's own
    metric."""
    target_utilisation: float
    draft_utilisation: float | None
    tokens_per_round: float
    found_share: float = 0.0
    """Share of prompt tokens that targets found in their caches."""

    @property
    def met_share(self) -> float:
        return self.num_met / self.num_requests if self.num_requests else 1.0

    def scaled(self, num_groups: int, num_drafts: int) -> RunResult:
        """Scales the result to a fleet of several such groups: rates grow, times and shares stay."""
        factor = num_groups / self.num_groups
        return replace(
            self,
            num_groups=num_groups,
            num_drafts=num_drafts,
            offered_tokens_per_s=factor * self.offered_tokens_per_s,
            tokens_per_s=factor * self.tokens_per_s,
            goodput_tokens_per_s=factor * self.goodput_tokens_per_s,
        )


def spread(samples: Iterable[tuple[float, float]]) -> Spread | None:
    """Returns the percentiles of (seconds, weight) samples; None without any."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return Spread(1e3 * _quantile(ordered, 0.5), 1e3 * _quantile(ordered, 0.95))


def _quantile(ordered: Sequence[tuple[float, float]], q: float) -> float:
    """Returns the least value that has a share ``q`` of the weight at or below it."""
    total = sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= q * total - 1e-12:
            return value
    return ordered[-1][0]
