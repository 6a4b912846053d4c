"""Statistics of a benchmark's records: plain arithmetic, so that it can be tested exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specray.bench.core.figures import Percentiles, gaps_ms, percentiles


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it; times in seconds on the monotonic clock."""

    started_s: float
    event_times_s: tuple[float, ...]
    """Arrivals of the events that brought text, in seconds; the first is the first token's."""
    ended_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_first_tokens: int | None = None
    """Output tokens up to the first event that brought text; None if events do not tell."""
    label: str = ""
    """Category of the prompt; empty where there are none."""

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds to the first token; None if no text came."""
        return 1e3 * (self.event_times_s[0] - self.started_s) if self.event_times_s else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Milliseconds between events; one event may bring several tokens."""
        return tuple(gaps_ms(self.event_times_s))

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None for a single token."""
        if self.num_output_tokens < 2 or not self.event_times_s:
            return None
        return 1e3 * (self.event_times_s[-1] - self.event_times_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class ArmSummary:
    name: str
    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    """Sum of the passes' wall times in seconds."""
    tokens_per_s: float
    tokens_per_s_of_passes: tuple[float, ...]
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    latency_ms: Percentiles | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Pass:
    records: tuple[RequestRecord, ...]
    duration_s: float
    num_failed: int = 0


def summarize(name: str, passes: Sequence[Pass]) -> ArmSummary:
    """Summarizes the passes of one arm."""
    records = [record for one in passes for record in one.records]
    duration_s = sum(one.duration_s for one in passes)
    num_output_tokens = sum(record.num_output_tokens for record in records)
    num_drafts = sum(record.num_spec_steps for record in records)
    num_draft_tokens = sum(record.num_draft_tokens for record in records)
    num_accepted = sum(record.num_accepted_draft_tokens for record in records)
    return ArmSummary(
        name=name,
        num_requests=len(records),
        num_failed=sum(one.num_failed for one in passes),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        num_output_tokens=num_output_tokens,
        duration_s=duration_s,
        tokens_per_s=num_output_tokens / duration_s if duration_s else 0.0,
        tokens_per_s_of_passes=tuple(_tokens_per_s(one) for one in passes),
        ttft_ms=percentiles([record.ttft_ms for record in records if record.ttft_ms is not None]),
        itl_ms=percentiles([gap for record in records for gap in record.itl_ms]),
        tpot_ms=percentiles([record.tpot_ms for record in records if record.tpot_ms is not None]),
        latency_ms=percentiles([1e3 * (record.ended_s - record.started_s) for record in records]),
        acceptance_rate=num_accepted / num_draft_tokens if num_draft_tokens else None,
        mean_acceptance_length=1 + num_accepted / num_drafts if num_drafts else None,
    )


def _tokens_per_s(one: Pass) -> float:
    num_tokens = sum(record.num_output_tokens for record in one.records)
    return num_tokens / one.duration_s if one.duration_s else 0.0
