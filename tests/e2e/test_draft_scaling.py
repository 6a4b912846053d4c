"""Tests of autoscaling over real Ray and HTTP: replicas come when there is work for them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import aiohttp
import pytest

from tests.e2e.service import DEADLINE_S, Service, complete

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
PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module", autouse=True)
def quick_metrics() -> Iterator[None]:
    """Lets replicas report to Serve every second instead of every ten; before the service starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        yield


async def num_drafted(http: aiohttp.ClientSession) -> float:
    """Tokens that the draft model has proposed; fillers need no draft."""
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "specray_spec_decode_num_draft_tokens_by_source_total{"
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'source="model"' in line
    )


async def test_without_a_draft_tokens_are_the_same_and_the_first_request_brings_one(
    service: Service, http: aiohttp.ClientSession
) -> None:
    plain = await complete(http, service, prompt=PROMPT, speculation={"enabled": False})
    assert await num_drafted(http) == 0
    started_s = time.monotonic()
    while not await num_drafted(http):
        assert time.monotonic() < started_s + DEADLINE_S, "no draft was started"
        assert (await complete(http, service, prompt=PROMPT))["choices"] == plain["choices"]
        await asyncio.sleep(PERIOD_S)
    print(f"from none: speculation {time.monotonic() - started_s:.1f} s after the first request")
    assert (await complete(http, service, prompt=PROMPT))["choices"] == plain["choices"]


async def replicas(http: aiohttp.ClientSession) -> dict[str, int]:
    """Returns the number of replicas of each deployment that answer a scrape."""
    async with http.get("/metrics") as response:
        text = await response.text()
    found = set(re.findall(r'deployment="(Router|Draft)",replica="([^"]+)"', text))
    return {name: sum(name == other for other, _ in found) for name in ("Router", "Draft")}


async def until(http: aiohttp.ClientSession, wanted: dict[str, int]) -> float:
    """Waits for the wanted number of replicas; returns the seconds that it took."""
    started_s = time.monotonic()
    while (found := await replicas(http)) != wanted:
        assert time.monotonic() < started_s + SCALING_DEADLINE_S, found
        await asyncio.sleep(PERIOD_S)
    return time.monotonic() - started_s


async def test_a_queue_brings_a_second_router_and_that_a_second_draft(
    service: Service, http: aiohttp.ClientSession
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": MAX_TOKENS}
    expected = (await complete(http, service, **fields))["choices"]
    is_over = asyncio.Event()

    async def clients() -> None:
        """All ask at the same time, so that all but one wait, and then again."""
        while not is_over.is_set():
            answers = await asyncio.gather(*(complete(http, service, **fields) for _ in range(NUM_CLIENTS)))
            assert [answer["choices"] for answer in answers] == [expected] * NUM_CLIENTS
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(clients())
        print(f"two of each after {await until(http, {'Router': 2, 'Draft': 2}):.1f} s")
        is_over.set()
