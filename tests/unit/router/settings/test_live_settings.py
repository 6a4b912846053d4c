"""Tests of a router that is configured anew while it serves: what runs goes on, what comes follows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specray.errors import OverloadedError
from specray.fakes import VirtualClock
from specray.requests import OutputChunk
from tests.unit.router.harness import (
    TARGET_S,
    Pair,
    complete,
    expected,
    request,
    router_config,
    serving,
    speculation_config,
)


def configure(pair: Pair, router: dict[str, Any] | None = None, **speculation: Any) -> None:
    pair.router.configure(router_config(**(router or {})), speculation_config(fallback="none", **speculation))


def drafts_per_step(output: OutputChunk) -> float:
    assert output.stats is not None
    return output.stats.num_draft_tokens / output.stats.num_spec_steps


def lookups(pair: Pair) -> float:
    """Verdicts that were looked up in what the draft had prepared: nearly all, while both overlap."""
    results = ("hit", "miss_token", "miss_count", "late_hit", "late_miss")
    return sum(pair.counted("specray_outcomes_total", result=result) for result in results)


async def begun(pair: Pair, request_id: str) -> asyncio.Task[OutputChunk]:
    task = asyncio.create_task(pair.router.complete(request(request_id, max_tokens=64)))
    await asyncio.sleep(10 * TARGET_S)
    assert not task.done()
    return task


async def test_a_new_k_is_for_new_requests_and_a_running_one_keeps_its_own(clock: VirtualClock) -> None:
    async with serving(clock, num_speculative_tokens=4, overlap="serial") as pair:
        running = await begun(pair, "a")
        configure(pair, num_speculative_tokens=2, overlap="serial")
        later = await complete(pair, request_id="b", max_tokens=40)
        output = await running
        assert output.token_ids == expected(request("a", max_tokens=64))
        assert drafts_per_step(output) > 3
        assert 1.5 < drafts_per_step(later) <= 2
        configure(pair, num_speculative_tokens=0)
        plain = await complete(pair, request_id="c")
        assert plain.stats is not None and plain.stats.num_draft_tokens == 0
        await pair.settle()


@pytest.mark.parametrize("overlap", ["enumerate", "ahead"])
async def test_the_loops_take_over_from_each_other_in_the_middle_of_a_request(
    clock: VirtualClock, overlap: str
) -> None:
    async with serving(clock, num_speculative_tokens=4, overlap="serial") as pair:
        for turn in range(4):
            running = await begun(pair, f"long-{turn}")
            configure(pair, num_speculative_tokens=4, overlap=overlap if turn % 2 == 0 else "serial")
            began_s, before = clock.monotonic(), lookups(pair)
            await complete(pair, request_id=f"short-{turn}", max_tokens=32)
            output = await running
            assert output.token_ids == expected(request(f"long-{turn}", max_tokens=64))
            # Nobody waited for an alarm: both are done within a few rounds for each token.
            assert clock.monotonic() - began_s < 64 * 3 * TARGET_S
            # With its prompt a request has one, whatever the loop.
            num_lookups = lookups(pair) - before
            assert num_lookups > 30 if turn % 2 == 0 else num_lookups <= 3
        await pair.settle()


async def test_a_smaller_queue_refuses_who_comes_and_keeps_who_waits(clock: VirtualClock) -> None:
    async with serving(clock, num_speculative_tokens=0) as pair:
        places = pair.target.info.max_num_seqs
        tasks = [
            asyncio.create_task(pair.router.complete(request(str(number), max_tokens=8)))
            for number in range(places + 2)
        ]
        await asyncio.sleep(TARGET_S)
        configure(pair, {"max_queued_requests": 1}, num_speculative_tokens=0)
        with pytest.raises(OverloadedError, match="2 requests wait; allowed: 1"):
            await pair.router.complete(request("new"))
        outputs = await asyncio.gather(*tasks)
        assert {len(output.token_ids) for output in outputs} == {8}
        await complete(pair, request_id="after")
        await pair.settle()
