"""When a router says that it is ready: after a real step of the target, whoever's it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.errors import EngineLostError
from specray.fakes import FakeTarget, LocalVerifier, VirtualClock
from specray.types import TargetReplies, VerifyItem
from tests.unit.router.harness import MODEL, TARGET_S, fake_target, request, router_config, serving


async def test_chunk_of_a_prompt_is_a_step_that_proves_readiness(clock: VirtualClock) -> None:
    target = FakeTarget(MODEL, cost=lambda rows: 100_000_000)
    async with serving(clock, target=target, config=router_config(prefill_chunk_tokens=16)) as pair:
        call = asyncio.create_task(pair.router.complete(request(prompt=[1] * 4000, max_tokens=1)))
        await asyncio.sleep(8.05)
        num_steps = target.num_steps
        assert num_steps == 81
        await pair.router.check_ready()
        assert clock.monotonic() == 8.05
        await call
        assert pair.counted("specray_prompt_tokens_total") == 4000, "no probe was sent"


async def test_step_of_others_is_proof_while_the_probe_waits_behind_them(clock: VirtualClock) -> None:
    target = FakeTarget(MODEL, cost=lambda rows: 6_000_000_000)
    config = router_config(prefill_chunk_tokens=16, verify_timeout_s=20.0)
    async with serving(clock, target=target, config=config) as pair:
        call = asyncio.create_task(pair.router.complete(request(prompt=[1] * 160, max_tokens=1)))
        await asyncio.sleep(11.5)
        await pair.router.check_ready()
        assert clock.monotonic() == pytest.approx(12.0, abs=0.011)
        assert not call.done()
        await call


async def test_full_queue_is_ready_with_the_next_step_of_the_target(clock: VirtualClock) -> None:
    info = replace(fake_target().info, max_num_seqs=1)
    target = FakeTarget(MODEL, info=info, cost=lambda rows: 8_000_000_000)
    async with serving(
        clock, target=target, config=router_config(max_queued_requests=0), num_speculative_tokens=0
    ) as pair:
        call = asyncio.create_task(pair.router.complete(request(max_tokens=3)))
        await asyncio.sleep(14.0)
        await pair.router.check_ready()
        assert clock.monotonic() == pytest.approx(16.0, abs=0.011)
        assert pair.counted("specray_requests_refused_total") == 1
        await call
        assert target.num_steps == 3


async def test_full_queue_of_a_target_that_is_silent_is_not_ready(clock: VirtualClock) -> None:
    target = fake_target(max_num_seqs=1)
    verifier = LocalVerifier(target, clock)
    config = router_config(max_queued_requests=0, verify_timeout_s=20.0)
    async with serving(clock, target=target, verifier=verifier, config=config) as pair:
        call = asyncio.create_task(pair.router.complete(request(max_tokens=1000)))
        await asyncio.sleep(1.0)
        verifier.hang()
        await asyncio.sleep(6.0)
        with pytest.raises(EngineLostError, match="the target was lost"):
            await pair.router.check_ready()
        assert clock.monotonic() == pytest.approx(21.0, abs=2 * TARGET_S)
        await asyncio.gather(call, return_exceptions=True)


async def test_target_that_fails_the_probe_is_not_ready(clock: VirtualClock) -> None:
    class BrokenOnce(FakeTarget):
        def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
            if not self.num_steps:
                self.fail_next(items[0].request_id, "the kernel is broken", is_retriable=False)
            return super().verify(items)

    config = router_config(verify_timeout_s=20.0)
    async with serving(clock, target=BrokenOnce(MODEL), config=config) as pair:
        with pytest.raises(EngineLostError, match="a probe failed: the kernel is broken"):
            await pair.router.check_ready()
        await pair.router.check_ready()
        await pair.settle()


async def test_full_queue_of_a_target_that_has_no_room_for_anybody_is_not_ready(clock: VirtualClock) -> None:
    config = router_config(max_queued_requests=0, verify_timeout_s=20.0)
    async with serving(clock, config=config) as pair:
        for _ in range(1000):
            pair.target.fail_next("a", "no room", is_retriable=True)
        call = asyncio.create_task(pair.router.complete(request("a")))
        await asyncio.sleep(1.0)
        with pytest.raises(EngineLostError, match="within verify_timeout_s = 20 s"):
            await pair.router.check_ready()
        assert clock.monotonic() == pytest.approx(21.0, abs=0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
