"""Tests of autoscaling over real Ray and HTTP: replicas come when there is work for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from tests.e2e.calls import complete, drafted_by_the_model, eventually, replicas
from tests.e2e.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

DELAYS = {"upscale_delay_s": 0, "downscale_delay_s": 1, "look_back_s": 10.1}
"""Delays in seconds; a draft that is judged too early is gone after a second."""
DRAFT = {
    "autoscaling": {"min_replicas": 0, "max_replicas": 2, "target_busy_share": 0.05, **DELAYS},
}
ROUTER = {
    "autoscaling": {"min_replicas": 1, "max_replicas": 2, "target_queued_tokens": 2, **DELAYS},
}
TARGET = {"max_num_seqs": 1}
NUM_CLIENTS = 6
MAX_TOKENS = 16
PERIOD_S = 0.5
"""Seconds between two looks."""
PAUSE_S = 0.5
"""Seconds between requests of a client: what is waited for needs the processor time, too."""
SCALING_DEADLINE_S = 150.0
"""Seconds for a second router and, 20 s after the first draft's start (UNJUDGED_S), a second draft."""


@pytest.fixture(scope="module", autouse=True)
def quick_metrics() -> Iterator[None]:
    """Lets replicas report to Serve every second instead of every ten; before the service starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        yield


async def test_without_a_draft_tokens_are_the_same_and_the_first_request_brings_one(
    service: Service, http: aiohttp.ClientSession
) -> None:
    plain = await complete(http, speculation={"enabled": False})
    assert await drafted_by_the_model(http) == 0

    async def is_drafted_for() -> bool:
        assert (await complete(http))["choices"] == plain["choices"]
        return await drafted_by_the_model(http) > 0

    await eventually(is_drafted_for, "a draft is started", period_s=PERIOD_S)
    assert (await complete(http))["choices"] == plain["choices"]


async def test_a_queue_brings_a_second_router_and_that_a_second_draft(
    service: Service, http: aiohttp.ClientSession
) -> None:
    fields = {"max_tokens": MAX_TOKENS}
    expected = (await complete(http, **fields))["choices"]
    is_over = asyncio.Event()

    async def clients() -> None:
        """All ask at the same time, so that all but one wait, and then again."""
        while not is_over.is_set():
            answers = await asyncio.gather(*(complete(http, **fields) for _ in range(NUM_CLIENTS)))
            assert [answer["choices"] for answer in answers] == [expected] * NUM_CLIENTS
            await asyncio.sleep(PAUSE_S)

    async def are_two() -> bool:
        return await replicas(http, "Router", "Draft") == {"Router": 2, "Draft": 2}

    async with asyncio.TaskGroup() as group:
        group.create_task(clients())
        await eventually(are_two, "two of each", deadline_s=SCALING_DEADLINE_S, period_s=PERIOD_S)
        is_over.set()
