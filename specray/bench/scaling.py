"""Measures what running requests notice while the number of Routers follows the load, up and down again."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from specray.bench.core.report import grid_of
from specray.config import Config

if TYPE_CHECKING:
    from rich.table import Table

PROMPTS: Final = tuple(
    f"def {name}(value):\n" for name in ("load", "store", "parse", "render", "sort", "merge")
)
MAX_TOKENS: Final = 96
LOOK_S: Final = 0.5
"""Seconds between two looks at the number of Routers."""
_ROUTER: Final = 'specray_running_sessions{application="specray",deployment="Router",replica="'


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    num_clients: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; times in seconds, its beginning on the clock of all."""

    began_s: float
    first_s: float
    longest_gap_s: float
    """Longest silence after the first tokens."""
    problem: str = ""
    """Empty: the output is that of a quiet service."""


@dataclass(frozen=True, slots=True)
class Course:
    """What happened in one phase."""

    phase: Phase
    asked: tuple[Asked, ...]
    num_routers: tuple[int, ...]
    """Routers that answered a scrape, look by look."""


async def measure_scaling(url: str, phases: Sequence[Phase]) -> list[Course]:
    """Loads a service in phases. Every output is compared with that of the same request before the first.

    Raises:
        aiohttp.ClientError: the service does not answer before the load.
    """
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        expected = {prompt: (await _text(http, prompt)).text for prompt in PROMPTS}
        courses = []
        for phase in phases:
            end_s = time.monotonic() + phase.seconds
            looking = asyncio.create_task(_look(http, end_s))
            clients = (_client(http, seed, end_s, expected) for seed in range(phase.num_clients))
            asked = [one for each in await asyncio.gather(*clients) for one in each]
            courses.append(Course(phase, tuple(asked), tuple(await looking)))
        return courses


async def _client(
    http: aiohttp.ClientSession, seed: int, end_s: float, expected: dict[str, str]
) -> list[Asked]:
    draw, asked = random.Random(seed), list[Asked]()
    while time.monotonic() < end_s:
        prompt, began_s = draw.choice(PROMPTS), time.monotonic()
        try:
            streamed = await _text(http, prompt)
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
            asked.append(Asked(began_s, 0.0, 0.0, f"failed: {error}"))
            await asyncio.sleep(0.5)
            continue
        problem = "" if streamed.text == expected[prompt] else "another output"
        asked.append(Asked(began_s, streamed.first_s, streamed.longest_gap_s, problem))
    return asked


@dataclass(frozen=True, slots=True)
class _Streamed:
    text: str
    first_s: float
    longest_gap_s: float


async def _text(http: aiohttp.ClientSession, prompt: str) -> _Streamed:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    began_s, pieces, times = time.monotonic(), list[str](), list[float]()
    async with http.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")
        async for event in _events(response):
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            pieces.append(event["choices"][0]["text"])
            times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return _Streamed("".join(pieces), times[0] - began_s, max(gaps, default=0.0))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def _look(http: aiohttp.ClientSession, end_s: float) -> list[int]:
    found = list[int]()
    while time.monotonic() < end_s:
        async with http.get("/metrics") as response:
            text = await response.text()
        found.append(len({line for line in text.splitlines() if line.startswith(_ROUTER)}))
        await asyncio.sleep(LOOK_S)
    return found


def scaled(config: Config, *, max_routers: int) -> Config:
    """The configuration with as many Routers as the load asks for, at once when it rises."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": max_routers,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 2.0,
        "look_back_s": 10.5,
    }
    values = config.model_dump(mode="json")
    values["router"] = {**values["router"], "autoscaling": scaling}
    return Config.model_validate(values)


def scaling_table(courses: Sequence[Course]) -> Table:
    headings = (
        "phase",
        "clients",
        "Routers",
        "requests",
        "failed",
        "wrong",
        "TTFT ms",
        "p99",
        "longest gap ms",
        "p50",
    )
    return grid_of("Routers that follow the load", headings, [_row(each) for each in courses])


def _row(course: Course) -> tuple[object, ...]:
    good = [one for one in course.asked if not one.problem]
    firsts = sorted(1e3 * one.first_s for one in good) or [0.0]
    gaps = [1e3 * one.longest_gap_s for one in good] or [0.0]
    problems = Counter(one.problem.partition(":")[0] for one in course.asked)
    return (
        course.phase.name,
        course.phase.num_clients,
        f"{course.num_routers[0]} to {course.num_routers[-1]}, most {max(course.num_routers)}",
        len(course.asked),
        problems["failed"],
        problems["another output"],
        statistics.median(firsts),
        firsts[int(0.99 * (len(firsts) - 1))],
        max(gaps),
        statistics.median(gaps),
    )
