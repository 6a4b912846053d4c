"""Admission as callers of the router see it: who waits, and who is refused with what advice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specray.errors import InvalidRequestError, OverloadedError
from specray.fakes import VirtualClock
from specray.requests import SpeculationParams
from tests.unit.router.harness import complete, fake_target, request, router_config, serving


async def test_full_queue_refuses_with_retry_after_and_admitted_requests_go_on(clock: VirtualClock) -> None:
    config = router_config(max_queued_requests=1)
    async with serving(clock, target=fake_target(max_num_seqs=2), config=config) as pair:
        calls = [asyncio.create_task(complete(pair, request_id=str(index))) for index in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refusal:
            await pair.router.complete(request("refused"))
        assert refusal.value.retry_after_s >= 1.0
        await asyncio.gather(*calls)
        assert pair.counted("specray_requests_refused_total") == 1
        await complete(pair, request_id="later")
        assert pair.counted("specray_preemptions_total") == 0, "a place that was left is free at once"
        await pair.settle()


async def test_more_requests_than_sequences_are_served_in_turn(clock: VirtualClock) -> None:
    async with serving(
        clock,
        target=fake_target(max_num_seqs=3, max_num_batched_tokens=16),
        config=router_config(prefill_chunk_tokens=16),
        num_speculative_tokens=4,
    ) as pair:
        await asyncio.gather(
            *(complete(pair, request_id=str(index), prompt=(index, 2, 3)) for index in range(10))
        )
        await pair.settle()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, 64)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4092}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"stop": ("x",)}, "stop"),
        ({"speculation": SpeculationParams(num_speculative_tokens=33)}, "num_speculative_tokens"),
    ],
)
async def test_request_that_cannot_be_served_is_refused_by_field(
    clock: VirtualClock, options: dict[str, Any], field: str
) -> None:
    async with serving(clock) as pair:
        with pytest.raises(InvalidRequestError) as refusal:
            await pair.router.complete(request(**options))
        assert refusal.value.field == field
        assert pair.target.num_steps == 0


async def test_request_id_in_use_is_refused_and_the_first_goes_on(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        first = asyncio.create_task(complete(pair, request_id="same"))
        await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequestError):
            await pair.router.complete(request("same"))
        await first
