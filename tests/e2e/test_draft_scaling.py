"""Drafts that come only when somebody speculates, over real Ray and HTTP."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from e2e_service import DEADLINE_S, Service, complete

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

DRAFT = {"autoscaling": {"min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0}}
PROMPT = "def fibonacci(n):\n"


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
        await asyncio.sleep(0.1)
    print(f"from none: speculation {time.monotonic() - started_s:.1f} s after the first request")
    assert (await complete(http, service, prompt=PROMPT))["choices"] == plain["choices"]
