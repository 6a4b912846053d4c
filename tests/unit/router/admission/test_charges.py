"""What a tenant is charged for requests that are not begun, or are put back, in a router over fakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specray.errors import DeadlineExceededError
from specray.fakes import VirtualClock
from tests.unit.router.harness import (
    TARGET_S,
    begin,
    begin_at_once,
    charged,
    fake_target,
    of_tenant,
    serving,
)


async def test_request_that_was_not_begun_costs_its_tenant_nothing(clock: VirtualClock) -> None:
    async with serving(clock, target=fake_target(max_num_seqs=2), num_speculative_tokens=0) as pair:
        ended: list[str] = []
        tasks = await begin_at_once(
            pair,
            ended,
            of_tenant("short", "x", max_tokens=10, priority=-1),
            of_tenant("long", "x", max_tokens=200, priority=-1),
        )
        # The short one ends after 10 steps; half a step is left then.
        hopeless = replace(of_tenant("hopeless", "mine", max_tokens=400), timeout_s=10.5 * TARGET_S)
        not_begun = asyncio.create_task(pair.router.complete(hopeless))
        await asyncio.sleep(0)
        for name, tenant in (("next", "mine"), ("last", "mine"), ("o0", "other"), ("o1", "other")):
            tasks.append(await begin(pair, ended, of_tenant(name, tenant, max_tokens=20)))
        with pytest.raises(DeadlineExceededError):
            await not_begun
        assert clock.monotonic() == pytest.approx(10 * TARGET_S, abs=0.001)
        assert charged(pair, "mine") == 5 + 20
        await asyncio.gather(*tasks)
        assert ended == ["short", "next", "o0", "last", "o1", "long"]
        await pair.settle()


@pytest.mark.parametrize("end", ["abort", "expire", "hopeless"])
async def test_request_that_ends_after_it_was_put_back_is_charged_for_what_it_had(
    clock: VirtualClock, end: str
) -> None:
    async with serving(clock, target=fake_target(max_num_seqs=3), num_speculative_tokens=0) as pair:
        ended: list[str] = []
        tasks = await begin_at_once(
            pair,
            ended,
            of_tenant("short", "x", max_tokens=10, priority=-1),
            of_tenant("long", "x", max_tokens=100, priority=-1),
        )
        pair.target.fail_next("back", "no room", is_retriable=True)
        timeout_s = {"abort": 100.0, "expire": 5.5 * TARGET_S, "hopeless": 10.5 * TARGET_S}[end]
        back = replace(of_tenant("back", "mine", max_tokens=400), timeout_s=timeout_s)
        put_back = asyncio.create_task(pair.router.complete(back))
        following = [of_tenant(f"next{index}", "mine", max_tokens=20) for index in range(3)]
        tasks += await begin_at_once(pair, ended, *following)
        await asyncio.sleep(5.2 * TARGET_S)
        assert charged(pair, "mine") == 5 + 400
        if end == "abort":
            put_back.cancel()
        # After 10 steps the short one ends, and two that follow are let in.
        await asyncio.sleep(5.2 * TARGET_S)
        assert put_back.done()
        assert charged(pair, "mine") == 5 + 2 * (5 + 20)
        assert pair.counted("specray_preemptions_total") == 1
        await asyncio.gather(*tasks)
        await asyncio.gather(put_back, return_exceptions=True)
        await pair.settle()


async def test_request_that_was_put_back_is_charged_once(clock: VirtualClock) -> None:
    async with serving(clock, target=fake_target(max_num_seqs=2), num_speculative_tokens=0) as pair:
        ended: list[str] = []
        pair.target.fail_next("back", "no room", is_retriable=True)
        tasks = await begin_at_once(
            pair,
            ended,
            of_tenant("short", "x", max_tokens=10, priority=-1),
            *(of_tenant(name, "mine", max_tokens=20) for name in ("back", "next", "last", "more")),
        )
        await asyncio.sleep(5.2 * TARGET_S)
        assert (pair.counted("specray_preemptions_total"), charged(pair, "mine")) == (1, 25)
        await asyncio.sleep(5.2 * TARGET_S)
        assert set(pair.router.sessions.running) == {"back", "next"}
        assert charged(pair, "mine") == 25 + 25
        await asyncio.gather(*tasks)
        await pair.settle()
