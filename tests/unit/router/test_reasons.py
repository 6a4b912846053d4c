"""Every round that commits tokens says why it has its plan, the same in trace and metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specray.fakes import FakeDraft, PerfectGuesser, VirtualClock
from specray.requests import GenerateRequest, SpeculationParams
from specray.router.trace import VerdictReceived, decode_trace
from specray.types import DraftKind
from tests.unit.router.harness import (
    MODEL,
    PROMPT,
    fake_draft,
    in_virtual_time,
    request,
    router_config,
    serving,
)


@in_virtual_time
async def reasons_of(
    clock: VirtualClock,
    requests: Sequence[GenerateRequest],
    *,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Counter[str]:
    """Serves the requests at once; checks that metrics count what the trace tells."""
    settings = router_config(trace_events=10_000, **(config or {}))
    async with serving(clock, config=settings, **({"overlap": "serial"} | options)) as pair:
        await asyncio.gather(*(pair.router.complete(one) for one in requests))
        await asyncio.sleep(1.0)
        events = decode_trace(await pair.router.trace_text() or "")
        verdicts = [event for event in events if isinstance(event, VerdictReceived)]
        traced = Counter(event.reason for event in verdicts if event.num_committed_tokens)
        counted: Counter[str] = Counter()
        for family in pair.router.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "specray_plans_total":
                    counted[sample.labels["reason"]] += int(sample.value)
        assert counted == traced
        return traced


def test_without_a_draft() -> None:
    assert reasons_of([request(max_tokens=8)], has_draft_model=False) == {"prefill": 1, "no_draft": 7}


def test_a_request_that_is_not_to_be_drafted_for() -> None:
    given = request(max_tokens=8, speculation=SpeculationParams(enabled=False))
    assert reasons_of([given]) == {"prefill": 1, "fixed": 7}


def test_a_request_that_is_drafted_for_without_a_model() -> None:
    given = request(max_tokens=8, speculation=SpeculationParams(draft=DraftKind.NGRAM))
    assert set(reasons_of([given])) == {"prefill", "local"}


def test_a_session_that_is_too_long_for_the_draft() -> None:
    """With K = 2 the draft needs room for six tokens more: it has 16, and the session soon 11."""
    reasons = reasons_of(
        [request(max_tokens=24)],
        draft=fake_draft(PerfectGuesser(MODEL), max_model_len=16),
        num_speculative_tokens=2,
    )
    # One token with the prompt; rounds of 2 and 3; from 11 tokens on one each, the last without a draft.
    assert reasons == {"prefill": 1, "fixed": 2, "too_long": 17, "last_token": 1}


def test_a_draft_that_has_stalled() -> None:
    slow = FakeDraft(PerfectGuesser(MODEL), cost=lambda steps: int(5e9))
    reasons = reasons_of([request(max_tokens=8)], draft=slow, num_speculative_tokens=2)
    assert reasons["stalled"] > 0 and sum(reasons.values()) <= 8


def test_prompts_go_first() -> None:
    """One session runs; four prompts come in chunks of 16 tokens a step."""
    given = [request("first", max_tokens=40)]
    given += [request(f"r{index}", PROMPT * 20, max_tokens=2) for index in range(4)]
    reasons = reasons_of(given, config={"prefill_chunk_tokens": 16}, num_speculative_tokens=2)
    assert reasons["prompts_first"] > 10


def test_outcomes_that_were_prepared_have_the_plan_that_asked_for_them() -> None:
    reasons = reasons_of(
        [request(max_tokens=10)],
        draft=fake_draft(PerfectGuesser(MODEL)),
        overlap="ahead",
        num_speculative_tokens=2,
    )
    assert reasons == {"prefill": 1, "fixed": 3}
