"""Measures the router's own cost of a round: real event loop, engines without tensors, no network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specray.config import SpeculationConfig
from specray.fakes import FakeDraft, FakeDrafterSource, FakeTarget, LocalDrafter, LocalVerifier, NoisyGuesser
from specray.interfaces import SyncDraftEngine, SyncTargetEngine
from specray.requests import GenerateRequest
from specray.router import Router, SystemClock
from specray.types import Overlap, SamplingParams

ItemT = TypeVar("ItemT")
RepliesT = TypeVar("RepliesT")


@dataclass(frozen=True, slots=True)
class RouterCost:
    """One measurement: wall time less the time inside the fake engines."""

    overlap: Overlap
    num_speculative_tokens: int
    num_sessions: int
    num_steps: int
    """Target steps measured."""
    step_us: float
    """Microseconds of Python per target step, both directions and both engines included."""


def measure_router(
    *,
    overlap: Overlap = Overlap.ENUMERATE,
    num_speculative_tokens: int = 3,
    num_sessions: int = 1,
    num_tokens: int = 1000,
    agreement: float = 0.6,
) -> RouterCost:
    """Runs ``num_sessions`` requests of ``num_tokens`` output tokens at once through a real router.

    Args:
        overlap: the loop and its fan-out.
        num_speculative_tokens: K; 0 measures plain continuous batching.
        num_sessions: requests at once, at most 64.
        num_tokens: output tokens of each.
        agreement: how often the fake draft is right.
    """
    speculation = SpeculationConfig.model_validate(
        {"overlap": overlap, "num_speculative_tokens": num_speculative_tokens}
    )
    return asyncio.run(_measure(speculation, overlap, num_sessions, num_tokens, agreement))


async def _measure(
    speculation: SpeculationConfig, overlap: Overlap, num_sessions: int, num_tokens: int, agreement: float
) -> RouterCost:
    clock = SystemClock()
    target = FakeTarget()
    draft = FakeDraft(NoisyGuesser(target.model, agreement))
    watch = _Watch()
    timed_target, timed_draft = _TimedTarget(target, watch), _TimedDraft(draft, watch)
    router = Router(
        LocalVerifier(timed_target, clock),
        FakeDrafterSource(lambda _: LocalDrafter(timed_draft, clock)),
        speculation=speculation,
        clock=clock,
    )
    await router.start()
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=4)
    requests = [
        GenerateRequest(f"bench-{index}", (1, 2, 3, index % 64), sampling, num_tokens)
        for index in range(num_sessions)
    ]
    started = time.perf_counter()
    await asyncio.gather(*(router.complete(request) for request in requests))
    elapsed_s = time.perf_counter() - started - watch.seconds
    await router.stop()
    k = speculation.num_speculative_tokens
    assert isinstance(k, int)
    return RouterCost(overlap, k, num_sessions, target.num_steps, 1e6 * elapsed_s / target.num_steps)


class _Watch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[Sequence[ItemT]], RepliesT], items: Sequence[ItemT]) -> RepliesT:
        started = time.perf_counter()
        replies = call(items)
        self.seconds += time.perf_counter() - started
        return replies


class _TimedTarget:
    def __init__(self, engine: SyncTargetEngine, watch: _Watch) -> None:
        self.info = engine.info
        self.release = engine.release
        self.check = engine.check
        self.verify = lambda items: watch.time(engine.verify, items)


class _TimedDraft:
    def __init__(self, engine: SyncDraftEngine, watch: _Watch) -> None:
        self.info = engine.info
        self.release = engine.release
        self.check = engine.check
        self.speculate = lambda items: watch.time(engine.speculate, items)
