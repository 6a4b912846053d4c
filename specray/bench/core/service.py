"""A service under measurement: routers over a local pair, and what they are asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from specray.config import Config
from specray.requests import GenerateRequest, OutputChunk, SpeculationParams
from specray.router import Router
from specray.router.trace import TraceEvent, decode_trace
from specray.serving.local.pair import LocalPair
from specray.types import SamplingParams, Verification

MAX_TRACE_EVENTS = 1_000_000
CONFIGURED = SpeculationParams()
"""Speculation as the router is configured."""


@asynccontextmanager
async def running(pair: LocalPair, config: Config) -> AsyncIterator[Router]:
    """Runs a router over the pair while the block runs."""
    async with running_all({"": (pair, config)}) as routers:
        yield routers[""]


@asynccontextmanager
async def running_all(arms: Mapping[str, tuple[LocalPair, Config]]) -> AsyncIterator[dict[str, Router]]:
    """Runs a router for each arm while the block runs, by the arm's name; they may share a pair."""
    async with AsyncExitStack() as stack:
        routers = {}
        for name, (pair, config) in arms.items():
            routers[name] = pair.router(config)
            await routers[name].start()
            stack.push_async_callback(routers[name].stop)
        yield routers


def request_of(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    speculation: SpeculationParams = CONFIGURED,
    verification: Verification = Verification.COUPLED,
) -> GenerateRequest:
    """A request for a whole output of ``max_tokens`` without stop tokens.

    Args:
        name: id of the request; unique in a router's life.
    """
    sampling = SamplingParams(
        temperature=temperature, seed=seed, num_prompt_tokens=len(prompt), verification=verification
    )
    return GenerateRequest(name, tuple(prompt), sampling, max_tokens, speculation=speculation)


async def ask_all(
    router: Router, requests: Iterable[GenerateRequest], *, concurrency: int | None = None
) -> list[OutputChunk]:
    """Returns all outputs, ``concurrency`` at a time; None: all at once.

    Raises:
        SpecrayError: a request failed.
    """
    asked = list(requests)
    places = asyncio.Semaphore(concurrency or max(1, len(asked)))

    async def one(request: GenerateRequest) -> OutputChunk:
        async with places:
            return await router.complete(request)

    return await asyncio.gather(*map(one, asked))


async def timed(
    router: Router, requests: Iterable[GenerateRequest], *, concurrency: int | None = None
) -> tuple[list[OutputChunk], float]:
    """Returns all outputs, and the seconds that they took together. Raises like ``ask_all``."""
    asked = list(requests)
    began_s = time.perf_counter()
    outputs = await ask_all(router, asked, concurrency=concurrency)
    return outputs, time.perf_counter() - began_s


async def trace_of(router: Router) -> list[TraceEvent]:
    """Returns the trace since the router's start, as far as ``router.trace_events`` goes."""
    return decode_trace(await router.trace_text() or "")
