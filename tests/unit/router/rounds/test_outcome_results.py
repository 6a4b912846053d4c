"""Every verdict that was to be looked up among outcomes is counted once, also where they never came."""

from __future__ import annotations

import asyncio

import pytest

from specray.fakes import FakeDraft, LocalDrafter, PerfectGuesser, VirtualClock
from tests.unit.router.harness import MODEL, Pair, expected, request, router_config, serving

RESULTS = ("hit", "miss_token", "miss_count", "late_hit", "late_miss", "timed_out", "draft_lost")
MAX_TOKENS = 40


def found(pair: Pair) -> dict[str, float]:
    """What there was of each result."""
    counts = {result: pair.counted("specray_outcomes_total", result=result) for result in RESULTS}
    return {result: count for result, count in counts.items() if count}


async def open_verdict(pair: Pair) -> None:
    """Until a verdict waits for its outcomes."""
    running = pair.router.sessions.running
    while not any(live.session.has_open_verdict for live in running.values()):  # noqa: ASYNC110  # Virtual time.
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("end", ["hang", "lose"])
async def test_outcomes_that_never_come_are_a_result_of_their_own(clock: VirtualClock, end: str) -> None:
    """The draft's outcomes take longer than a Verify, so each verdict waits for them."""

    draft = FakeDraft(PerfectGuesser(MODEL), cost=lambda steps: int(0.03e9))
    made: list[LocalDrafter] = []

    def lease(_: int) -> LocalDrafter:
        made.append(LocalDrafter(draft, clock, hangs_after=10 if end == "hang" else None))
        return made[-1]

    async with serving(
        clock,
        make_drafter=lease,
        config=router_config(round_timeout_s=100),
        overlap="enumerate",
        num_speculative_tokens=2,
    ) as pair:
        given = request("a", max_tokens=MAX_TOKENS)
        call = asyncio.create_task(pair.router.complete(given))
        await asyncio.sleep(0.2)
        assert set(found(pair)) == {"late_hit"}
        await open_verdict(pair)
        if end == "lose":
            draft.forget()
            made[0].lose()
        assert (await call).token_ids == expected(given)
        after = found(pair)
        name = "timed_out" if end == "hang" else "draft_lost"
        assert after[name] == 1
        assert set(after) == {"late_hit", name}
