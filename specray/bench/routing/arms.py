"""Runs conversations on real Routers with tiny engines, and on the same fleet in virtual time."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from specray.bench.routing.conversations import FIRST_TOKEN, Answer, Ask, ConversationLoad, Outcome, converse
from specray.bench.testbed.beds import open_bed
from specray.bench.testbed.kinds import BedKind
from specray.config import Config, parse_config
from specray.errors import EngineLostError
from specray.fakes import VirtualClock
from specray.planning.profile import Profile
from specray.planning.simulation.fleet import Fleet, Kit
from specray.requests import GenerateRequest
from specray.types import SamplingParams

ARMS: Final = ("prefix", "load")
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Result:
    """One arm: what happened, and the most that a Router had of the mean."""

    arm: str
    outcome: Outcome
    tokens_per_s: float
    imbalance: float
    """Most prompt and output tokens of a Router over their mean; 1: all have the same."""


def routing_config(arm: str, *, num_routers: int, engine: Mapping[str, Any]) -> Config:
    """Routers without a draft: what is measured is where prompts go."""
    return parse_config(
        {
            "target": dict(engine),
            "draft": {"num_replicas": 0},
            "router": {"num_replicas": num_routers, "routing": arm, "start_timeout_s": 300},
        }
    )


async def run_real(config: Config, load: ConversationLoad, *, seed: int = 0) -> Result:
    """Starts a service, holds the conversations over HTTP, and ends it.

    Raises:
        EngineLostError: it did not start, or a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="specray-routing-") as directory:
        async with (
            open_bed(BedKind.PROCESSES, config, directory=Path(directory)) as bed,
            aiohttp.ClientSession(bed.url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http,
        ):

            async def ask(_: str, prompt: tuple[int, ...]) -> Answer:
                return await _ask(http, prompt, load.output_tokens)

            await _warm_up(ask)
            outcome = await converse(load, ask, seed=seed)
            async with http.get("/metrics") as response:
                shares = _by_router(await response.text())
    return _result(config.router.routing, outcome, load, shares)


def run_simulated(
    config: Config, profile: Profile, load: ConversationLoad, *, num_routers: int, seed: int = 0
) -> Result:
    """The same in virtual time, on engines with the profile's times."""
    clock = VirtualClock()
    kit = Kit(profile.target, None, None, profile.router, router_config=config.router)
    fleet = Fleet(kit, clock, num_routers, 0, seed, has_prefixes=True)

    async def ask(name: str, prompt: tuple[int, ...]) -> Answer:
        sampling = SamplingParams(num_prompt_tokens=len(prompt))
        sent = await fleet.send(GenerateRequest(name, prompt, sampling, load.output_tokens))
        if sent.ttft_s is None:
            raise EngineLostError("a simulated Router refused a request")
        return Answer(sent.token_ids, sent.ttft_s, sent.num_cached_tokens)

    async def run() -> Outcome:
        await fleet.start()
        outcome = await converse(load, ask, seed=seed, now=clock.monotonic)
        await fleet.stop()
        return outcome

    outcome = clock.run(run())
    return _result(config.router.routing, outcome, load, [float(each.num_sent) for each in fleet.groups])


def _result(arm: str, outcome: Outcome, load: ConversationLoad, shares: list[float]) -> Result:
    rate = len(outcome.turns) * load.output_tokens / outcome.seconds
    return Result(arm, outcome, rate, max(shares) * len(shares) / sum(shares))


async def _warm_up(ask: Ask) -> None:
    """Sends prompts that share nothing, so that every Router has taken its first steps."""
    prompts = [(FIRST_TOKEN + number, *range(FIRST_TOKEN, FIRST_TOKEN + 100)) for number in range(32)]
    await asyncio.gather(*(ask("", prompt) for prompt in prompts))


async def _ask(http: aiohttp.ClientSession, prompt: tuple[int, ...], num_tokens: int) -> Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began_s, first_s, usage = time.monotonic(), 0.0, None
    token_ids: list[int] = []
    async with http.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise EngineLostError(f"the service answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineLostError(f"the service answered: {event['error']}")
            for choice in event["choices"]:
                first_s = first_s or time.monotonic()
                token_ids.extend(choice.get("token_ids") or ())
            usage = event.get("usage") or usage
    if usage is None:
        raise EngineLostError("a stream ended without its usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(tuple(token_ids), first_s - began_s, cached)


def _by_router(text: str) -> list[float]:
    name = "specray_time_to_first_token_seconds_count"
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
