"""Measures a running service at its capacity, and then at a multiple of it.

First a closed loop of ``concurrency`` requests finds the rate that the service keeps up with. Then requests
arrive at ``factor`` times that rate whatever the service does: a Poisson process with a seed, without
retries. Only status lines and the marks between events are parsed, since the generator shares its machine
with the service.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from specray.bench.core.figures import Percentiles, gaps_ms, percentiles
from specray.bench.load.client import ServerClient, key_header
from specray.bench.load.memory import ProcessMemory, read_memory, service_pids
from specray.bench.load.raw_http import RawAnswer, RawClient
from specray.bench.plans import OverloadPlan
from specray.environment import api_key
from specray.errors import SpecrayError

PATH: Final = "/v1/completions"
REFUSED: Final = 429
WITH_LEVEL: Final = "with a level"
WITHOUT_LEVEL: Final = "without"
SETTLE_S: Final = 2.0
"""Seconds between the last answer and the last reading of the service's memory."""


@dataclass(frozen=True, slots=True)
class ClassOfRequests:
    """Times of the requests of a phase that have a service level, or of those that have none."""

    num_admitted: int
    tpot_ms: Percentiles | None
    ttft_ms: Percentiles | None
    attainment: float | None
    """Share of the admitted requests that kept the level; of those without one, would have."""


@dataclass(frozen=True, slots=True)
class Phase:
    duration_s: float
    """Seconds until the last request was sent."""
    num_sent: int
    num_admitted: int
    """Requests that were answered to their end."""
    num_refused: int
    """Requests that were answered with 429."""
    num_refused_with_retry_after: int
    num_refused_in_time: int
    """Refusals within 100 ms."""
    errors: dict[str, int]
    """Other failures, by kind."""
    num_not_sent: int
    latest_ms: float
    """Longest delay in milliseconds with which the generator sent a request after its planned time."""
    itl_ms: Percentiles | None
    """Milliseconds between events of a stream; one event may bring several tokens."""
    tpot_ms: Percentiles | None
    """Milliseconds per output token after the first event, of whole requests."""
    ttft_ms: Percentiles | None
    latency_ms: Percentiles | None
    refusal_ms: Percentiles | None
    """Milliseconds from sending to the last byte of the 429."""
    slowest_refusal_ms: float | None
    classes: Mapping[str, ClassOfRequests] = field(default_factory=dict)
    """``with a level`` and ``without``; empty where no request has one."""


@dataclass(frozen=True, slots=True)
class OverloadResult:
    plan: OverloadPlan
    model: str
    capacity_per_s: float
    offered_per_s: float
    capacity: Phase
    overload: Phase
    memory_before: tuple[ProcessMemory, ...]
    """Memory after the first phase; empty: the service is not on this machine."""
    memory_early: tuple[ProcessMemory, ...]
    """Memory after the first quarter of the overload, when everything has been as full as it gets."""
    memory_after: tuple[ProcessMemory, ...]

    @property
    def itl_ratio(self) -> float | None:
        return _ratio(self.overload.itl_ms, self.capacity.itl_ms)

    @property
    def tpot_ratio(self) -> float | None:
        return _ratio(self.overload.tpot_ms, self.capacity.tpot_ms)


async def measure_overload(
    plan: OverloadPlan, prompts: Sequence[str], on_progress: Callable[[str, float], None]
) -> OverloadResult:
    """Runs both phases, after a warm-up.

    Args:
        on_progress: called now and then with the phase's name and the share of it that is over, in [0, 1].

    Raises:
        EngineLostError: there is no server.
        SpecrayError: no request was answered at capacity, so that there is nothing to compare with.
    """
    async with ServerClient(plan.url, key=api_key()) as server:
        model = await server.model()
    client = RawClient(plan.url, PATH, headers=key_header(api_key()), timeout_s=plan.timeout_s)
    bodies = _bodies(plan, prompts)
    try:
        if plan.warmup > 0:
            await _closed_loop(plan, client, bodies, "warm-up", plan.warmup, on_progress)
        started_s = time.monotonic()
        answers = await _closed_loop(plan, client, bodies, "capacity", plan.capacity_duration, on_progress)
        capacity = _phase(plan, answers, time.monotonic() - started_s)
        if capacity.latency_ms is None:
            raise SpecrayError(f"no request was answered at capacity: {capacity.errors or 'all refused'}")
        # Little's law: requests under way divided by the mean time that each takes.
        rate_per_s = plan.rate or 1e3 * plan.concurrency / capacity.latency_ms.mean
        pids = service_pids(urlsplit(plan.url).port or 80)
        before = read_memory(pids)
        early = asyncio.create_task(_read_later(pids, plan.duration / 4))
        overload = await _open_loop(plan, client, bodies, plan.factor * rate_per_s, on_progress)
        await asyncio.sleep(SETTLE_S)
        after = read_memory(pids)
    finally:
        client.close()
    return OverloadResult(
        plan,
        model,
        rate_per_s,
        plan.factor * rate_per_s,
        capacity,
        overload,
        tuple(before),
        tuple(await early),
        tuple(after),
    )


async def _read_later(pids: Sequence[int], seconds: float) -> list[ProcessMemory]:
    await asyncio.sleep(seconds)
    return read_memory(pids)


def arrivals(rate_per_s: float, duration_s: float, max_requests: int, seed: int) -> Iterator[float]:
    """Yields the arrivals in seconds from the start: a Poisson process, bounded in time and number."""
    rng = random.Random(seed)
    now_s = 0.0
    for _ in range(max_requests):
        now_s += rng.expovariate(rate_per_s)
        if now_s > duration_s:
            return
        yield now_s


def _bodies(plan: OverloadPlan, prompts: Sequence[str]) -> Iterator[tuple[bytes, str]]:
    """Yields requests without end, with their class; no prompt comes twice, so that no cache knows it."""
    index = 0
    while True:
        for prompt in prompts:
            tenant = plan.tenant[index % len(plan.tenant)] if plan.tenant else ""
            has_level = bool(plan.slo) and int((index + 1) * plan.slo_share) > int(index * plan.slo_share)
            body = json.dumps(
                {
                    "prompt": f"# {plan.seed}.{index}\n{prompt}",
                    "max_tokens": plan.max_tokens,
                    "temperature": plan.temperature,
                    "seed": plan.seed,
                    "ignore_eos": True,
                    "stream": True,
                    **({"speculation": {"tenant": tenant}} if tenant else {}),
                    **({"slo": plan.slo} if has_level and plan.send_slo else {}),
                }
            ).encode()
            yield body, WITH_LEVEL if has_level else WITHOUT_LEVEL
            index += 1


async def _post(client: RawClient, bodies: Iterator[tuple[bytes, str]]) -> RawAnswer:
    body, label = next(bodies)
    return replace(await client.post(body), label=label)


async def _closed_loop(
    plan: OverloadPlan,
    client: RawClient,
    bodies: Iterator[tuple[bytes, str]],
    name: str,
    duration_s: float,
    on_progress: Callable[[str, float], None],
) -> list[RawAnswer]:
    answers: list[RawAnswer] = []
    started_s = time.monotonic()
    end_s = started_s + duration_s

    async def work() -> None:
        while (now_s := time.monotonic()) < end_s:
            on_progress(name, (now_s - started_s) / duration_s)
            answer = await _post(client, bodies)
            answers.append(answer)
            if answer.status != 200:
                # A client that is refused at once would come back at once.
                await asyncio.sleep(min(1.0, duration_s / 10))

    await asyncio.gather(*(work() for _ in range(plan.concurrency)))
    return answers


async def _open_loop(
    plan: OverloadPlan,
    client: RawClient,
    bodies: Iterator[tuple[bytes, str]],
    rate_per_s: float,
    on_progress: Callable[[str, float], None],
) -> Phase:
    answers: list[RawAnswer] = []
    under_way: set[asyncio.Task[None]] = set()
    num_not_sent, latest_s = 0, 0.0

    async def send() -> None:
        answers.append(await _post(client, bodies))

    started_s = time.monotonic()
    for due_s in arrivals(rate_per_s, plan.duration, plan.max_requests, plan.seed):
        wait_s = started_s + due_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        latest_s = max(latest_s, time.monotonic() - started_s - due_s)
        on_progress("overload", due_s / plan.duration)
        # Largest number of requests under way; an arrival beyond it is counted, but not sent.
        if len(under_way) >= 4096:
            num_not_sent += 1
            continue
        task = asyncio.create_task(send())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    duration_s = time.monotonic() - started_s
    await asyncio.gather(*under_way)
    return _phase(plan, answers, duration_s, num_not_sent=num_not_sent, latest_s=latest_s)


def _phase(
    plan: OverloadPlan,
    answers: Sequence[RawAnswer],
    duration_s: float,
    *,
    num_not_sent: int = 0,
    latest_s: float = 0.0,
) -> Phase:
    admitted = [answer for answer in answers if answer.status == 200 and not answer.error]
    refused = [answer for answer in answers if answer.status == REFUSED]
    errors = Counter(_kind(each) for each in answers if each.status != REFUSED and each.error)
    gaps = [gap for answer in admitted for gap in gaps_ms(answer.event_times_s)]
    return Phase(
        duration_s=duration_s,
        num_sent=len(answers),
        num_admitted=len(admitted),
        num_refused=len(refused),
        num_refused_with_retry_after=sum(answer.has_retry_after for answer in refused),
        num_refused_in_time=sum(answer.seconds <= 0.1 for answer in refused),
        errors=dict(errors.most_common(20)),
        num_not_sent=num_not_sent,
        latest_ms=1e3 * latest_s,
        itl_ms=percentiles(gaps),
        tpot_ms=percentiles([tpot for each in admitted if (tpot := _tpot_ms(each, plan.max_tokens))]),
        ttft_ms=percentiles(
            [1e3 * (each.event_times_s[0] - each.started_s) for each in admitted if each.event_times_s]
        ),
        latency_ms=percentiles([1e3 * answer.seconds for answer in admitted]),
        refusal_ms=percentiles([1e3 * answer.seconds for answer in refused]),
        slowest_refusal_ms=max((1e3 * answer.seconds for answer in refused), default=None),
        classes=_classes(plan, admitted) if plan.slo else {},
    )


def _classes(plan: OverloadPlan, admitted: Sequence[RawAnswer]) -> dict[str, ClassOfRequests]:
    classes = {}
    for label in (WITH_LEVEL, WITHOUT_LEVEL):
        own = [answer for answer in admitted if answer.label == label and answer.event_times_s]
        ttft = [1e3 * (answer.event_times_s[0] - answer.started_s) for answer in own]
        tpot = [_tpot_ms(answer, plan.max_tokens) or 0.0 for answer in own]
        kept = [
            first <= plan.slo.get("ttft_ms", math.inf) and each <= plan.slo.get("itl_ms", math.inf)
            for first, each in zip(ttft, tpot, strict=True)
        ]
        classes[label] = ClassOfRequests(
            num_admitted=len(own),
            tpot_ms=percentiles(tpot),
            ttft_ms=percentiles(ttft),
            attainment=sum(kept) / len(kept) if kept else None,
        )
    return classes


def _tpot_ms(answer: RawAnswer, num_tokens: int) -> float | None:
    times_s = answer.event_times_s
    return 1e3 * (times_s[-1] - times_s[0]) / (num_tokens - 1) if len(times_s) > 1 else None


def _kind(answer: RawAnswer) -> str:
    return f"{answer.status or 'no answer'}: {answer.error}"


def _ratio(above: Percentiles | None, below: Percentiles | None) -> float | None:
    return above.p50 / below.p50 if above is not None and below is not None and below.p50 else None
