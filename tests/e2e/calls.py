"""What end-to-end tests ask of a service, and how they wait for it."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 60.0
PROMPT = "def fibonacci(n):\n"
T = TypeVar("T")


async def eventually(
    find: Callable[[], T | Awaitable[T]], what: str, *, deadline_s: float = DEADLINE_S, period_s: float = 0.2
) -> T:
    """Returns the first result that is true."""
    end = time.monotonic() + deadline_s
    while True:
        found = find()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(period_s)


async def complete(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, **fields}
    async with http.post("/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def text_of(http: aiohttp.ClientSession, **fields: Any) -> str:
    return str((await complete(http, **fields))["choices"][0]["text"])


async def streamed(
    http: aiohttp.ClientSession, midway: Callable[[], Any] = lambda: None, **fields: Any
) -> tuple[str, dict[str, Any] | None]:
    """Returns the text, and the error that ended it; ``midway`` starts with the second chunk."""
    pieces: list[str] = []
    error, disturbing = None, None
    body = {"prompt": PROMPT, "stream": True, **fields}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if error := event.get("error"):
                    break
                pieces.append(event["choices"][0]["text"])
                if len(pieces) == 2 and inspect.isawaitable(doing := midway()):
                    disturbing = asyncio.ensure_future(doing)
    if disturbing is not None:
        await disturbing
    return "".join(pieces), error


async def samples(http: aiohttp.ClientSession) -> list[Any]:
    """Samples of one scrape, in which each family stands once."""
    async with http.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    assert len({family.name for family in families}) == len(families)
    return [sample for family in families for sample in family.samples]


async def metric(http: aiohttp.ClientSession, name: str, /, **labels: str) -> float:
    """The sum of a metric over its other labels."""
    found = [sample for sample in await samples(http) if sample.name == name]
    assert found or labels, f"/metrics has no {name}"
    return float(sum(sample.value for sample in found if labels.items() <= sample.labels.items()))


async def replicas(http: aiohttp.ClientSession, *deployments: str) -> dict[str, int]:
    """Replicas of each deployment that answer a scrape."""
    labels = [sample.labels for sample in await samples(http) if "replica" in sample.labels]
    found = {(each["deployment"], each["replica"]) for each in labels}
    return {name: sum(name == other for other, _ in found) for name in deployments}


async def drafted_by_the_model(http: aiohttp.ClientSession) -> float:
    """Tokens that the draft model has proposed; fallbacks need no draft."""
    return await metric(http, "specray_spec_decode_num_draft_tokens_by_source_total", source="model")


async def speculates(http: aiohttp.ClientSession) -> bool:
    before = await drafted_by_the_model(http)
    await complete(http, max_tokens=24)
    return await drafted_by_the_model(http) > before
