"""How long a round takes: what overlap hides of the draft, what a miss costs, and whom others wait for."""

from __future__ import annotations

import asyncio

import pytest

from specray.fakes import AdversarialGuesser, PerfectGuesser, VirtualClock
from specray.requests import SpeculationParams
from tests.unit.router.harness import (
    DRAFT_STEP_S,
    MODEL,
    TARGET_S,
    chunks_of,
    complete,
    expected,
    fake_draft,
    request,
    router_config,
    serving,
)


@pytest.mark.parametrize(
    ("overlap", "period_s"),
    [("serial", TARGET_S + 3 * DRAFT_STEP_S), ("ahead", TARGET_S), ("enumerate", TARGET_S)],
)
async def test_period_of_a_round(clock: VirtualClock, overlap: str, period_s: float) -> None:
    """Serial: verify plus draft. Overlapped with a perfect draft: verify alone, for everything is hidden."""

    draft = fake_draft(PerfectGuesser(MODEL))
    async with serving(clock, draft=draft, overlap=overlap, num_speculative_tokens=3) as pair:
        await complete(pair, max_tokens=403)
        # The first step has no draft tokens; a hundred rounds of four tokens follow.
        assert clock.monotonic() == pytest.approx(TARGET_S + 101 * period_s, rel=0.02)


async def test_miss_costs_one_fresh_proposal(clock: VirtualClock) -> None:
    draft = fake_draft(AdversarialGuesser(MODEL))
    async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=2) as pair:
        await complete(pair, max_tokens=101)
        assert clock.monotonic() == pytest.approx(101 * TARGET_S + 99 * 2 * DRAFT_STEP_S, rel=0.02)
        # Two more: the first has no proposal, the last no room for one.
        assert pair.counted("specray_outcomes_total", result="miss_count") == 98


async def test_round_overhead_leaves_both_forwards_out(clock: VirtualClock) -> None:
    for overlap in ("serial", "enumerate"):
        async with serving(clock, overlap=overlap, num_speculative_tokens=3) as pair:
            await complete(pair, max_tokens=100)
            assert pair.counted("specray_round_overhead_seconds_count") > 20
            assert pair.counted("specray_round_overhead_seconds_sum") < 1e-9


@pytest.mark.slow
async def test_late_proposal_of_one_session_holds_back_another_for_a_quarter_step_at_most(
    clock: VirtualClock,
) -> None:
    draft = fake_draft(AdversarialGuesser(MODEL))
    async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=4) as pair:
        drafted = asyncio.create_task(complete(pair, request_id="drafted", max_tokens=300))
        await asyncio.sleep(10.5 * TARGET_S)
        started = clock.monotonic()
        off = SpeculationParams(enabled=False)
        await complete(pair, request_id="plain", max_tokens=100, speculation=off)
        # Each of the other's rounds misses, and its fresh proposal takes 4/5 of a step.
        step_s = (clock.monotonic() - started) / 100
        assert TARGET_S < step_s < 1.26 * TARGET_S
        await drafted


async def test_straggler_whose_proposal_comes_in_the_grace_time_rides_along(clock: VirtualClock) -> None:
    draft = fake_draft(AdversarialGuesser(MODEL))
    async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=1) as pair:
        off = SpeculationParams(enabled=False)
        await asyncio.gather(
            complete(pair, request_id="drafted", max_tokens=50),
            complete(pair, request_id="plain", max_tokens=50, speculation=off),
        )
        # Fresh proposals take 1/5 of a step: both sessions share every step.
        assert pair.target.num_steps <= 52


async def test_last_chunk_of_a_prefill_already_carries_draft_tokens(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    config = router_config(prefill_chunk_tokens=16)
    async with serving(clock, draft=draft, config=config, overlap="ahead", num_speculative_tokens=3) as pair:
        given = request(prompt=tuple(range(60)), max_tokens=20)
        timed = await chunks_of(pair, given)
        assert timed[0][0] == pytest.approx(4 * TARGET_S)
        assert timed[0][1].token_ids == expected(given)[:4]
