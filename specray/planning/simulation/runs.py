"""Runs a fleet under a load, and measures it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from specray.fakes import VirtualClock
from specray.planning.load import ClosedLoad, OpenLoad
from specray.planning.simulation.fleet import Fleet, Kit
from specray.planning.simulation.results import RunResult, SimulatedRequest, Slo, TimeWindow, spread


def simulate(
    kit: Kit,
    load: OpenLoad,
    window: TimeWindow,
    *,
    num_groups: int,
    num_drafts: int,
    slo: Slo,
    seed: int = 0,
) -> RunResult:
    """Runs a fleet; the same arguments give the same result."""
    clock = VirtualClock()
    fleet = Fleet(kit, clock, num_groups, num_drafts, seed, has_prefixes=load.prefixes is not None)
    return clock.run(_simulate(fleet, load, window, slo, seed))


def simulate_closed(
    kit: Kit, load: ClosedLoad, *, num_groups: int = 1, num_drafts: int = 1, seed: int = 0
) -> RunResult:
    """Runs a closed load; measured from the first request to the end of the last. See ``simulate``."""
    clock = VirtualClock()
    fleet = Fleet(kit, clock, num_groups, num_drafts, seed, has_prefixes=load.prefixes is not None)
    return clock.run(_simulate_closed(fleet, load, seed))


def simulate_saturated(
    kit: Kit,
    load: OpenLoad,
    *,
    sessions_per_group: int,
    num_groups: int,
    num_drafts: int,
    seed: int = 0,
) -> RunResult:
    """Runs a constant number of requests; start and end, when there are fewer, are left out."""
    concurrency = num_groups * sessions_per_group
    closed = ClosedLoad(
        concurrency, 3 * concurrency, load.prompt, load.output, load.temperature, load.prefixes
    )
    clock = VirtualClock()
    fleet = Fleet(kit, clock, num_groups, num_drafts, seed, has_prefixes=load.prefixes is not None)
    return clock.run(_simulate_closed(fleet, closed, seed, skipped=concurrency))


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters of a fleet at one moment."""

    now_s: float
    num_tokens: int
    num_rounds: int
    targets_s: float
    drafts_s: float


def _read(fleet: Fleet, clock: VirtualClock) -> _Counters:
    return _Counters(clock.monotonic(), fleet.num_tokens(), fleet.num_rounds(), *fleet.busy_s())


async def _simulate(fleet: Fleet, load: OpenLoad, window: TimeWindow, slo: Slo, seed: int) -> RunResult:
    clock = fleet.clock
    await fleet.start()
    start_s = clock.monotonic()
    begin_s = start_s + window.warmup_s
    end_s = begin_s + window.length_s
    measured: list[asyncio.Task[SimulatedRequest]] = []
    others: set[asyncio.Task[SimulatedRequest]] = set()
    arrivals = load.arrivals(random.Random(f"{seed}-arrivals"))
    lengths = random.Random(f"{seed}-lengths")

    async def arrive() -> None:
        for offset in arrivals:
            await clock.sleep(start_s + offset - clock.monotonic())
            task = asyncio.create_task(
                fleet.serve(load.prompt, load.output, lengths, load.temperature, load.prefixes)
            )
            if begin_s <= clock.monotonic() < end_s:
                measured.append(task)
            else:
                others.add(task)
                task.add_done_callback(others.discard)

    arriving = asyncio.create_task(arrive())
    await clock.sleep(begin_s - clock.monotonic())
    before = _read(fleet, clock)
    await clock.sleep(end_s - clock.monotonic())
    after = _read(fleet, clock)
    if measured:
        # The load goes on meanwhile, so that the last requests have company, too.
        # The window's requests may end after it for as long as it was: longer than any should take.
        await asyncio.wait(measured, timeout=window.length_s)
    arriving.cancel()
    unfinished = [task for task in (*measured, *others) if not task.done()]
    for task in unfinished:
        task.cancel()
    await asyncio.gather(arriving, *unfinished, return_exceptions=True)
    await fleet.stop()
    outcomes = [task.result() for task in measured if not task.cancelled()]
    return _result(fleet, outcomes, before, after, slo, num_requests=len(measured))


async def _simulate_closed(fleet: Fleet, load: ClosedLoad, seed: int, *, skipped: int = 0) -> RunResult:
    """Runs the load; ``skipped`` requests before and after the window are left out."""
    clock = fleet.clock
    await fleet.start()
    lengths = random.Random(f"{seed}-lengths")
    waiting = iter(range(load.num_requests))
    outcomes: list[SimulatedRequest] = []
    readings: list[_Counters] = []

    async def work() -> None:
        for _ in waiting:
            outcomes.append(
                await fleet.serve(load.prompt, load.output, lengths, load.temperature, load.prefixes)
            )
            if len(outcomes) in (skipped, load.num_requests - skipped):
                readings.append(_read(fleet, clock))

    if not skipped:
        readings.append(_read(fleet, clock))
    await asyncio.gather(*(work() for _ in range(load.concurrency)))
    await fleet.stop()
    before, after = readings
    inside = outcomes[skipped : load.num_requests - skipped]
    return _result(fleet, inside, before, after, Slo(), num_requests=len(inside))


def _result(
    fleet: Fleet,
    outcomes: list[SimulatedRequest],
    before: _Counters,
    after: _Counters,
    slo: Slo,
    *,
    num_requests: int,
) -> RunResult:
    length_s = after.now_s - before.now_s
    met = [outcome for outcome in outcomes if outcome.meets(slo)]
    num_drafts, num_rounds = len(fleet.drafts), after.num_rounds - before.num_rounds
    num_tokens = after.num_tokens - before.num_tokens
    drafts_s = after.drafts_s - before.drafts_s
    return RunResult(
        num_groups=len(fleet.groups),
        num_drafts=num_drafts,
        window_s=length_s,
        offered_tokens_per_s=sum(outcome.num_output_tokens for outcome in outcomes) / length_s,
        tokens_per_s=num_tokens / length_s,
        goodput_tokens_per_s=sum(outcome.num_output_tokens for outcome in met) / length_s,
        num_requests=num_requests,
        num_met=len(met),
        num_refused=sum(outcome.ended_s is None for outcome in outcomes),
        ttft_ms=spread((outcome.ttft_s, 1.0) for outcome in outcomes if outcome.ttft_s is not None),
        itl_ms=spread(fleet.gaps(before.now_s, after.now_s)),
        target_utilisation=(after.targets_s - before.targets_s) / (length_s * len(fleet.groups)),
        draft_utilisation=drafts_s / (length_s * num_drafts) if num_drafts else None,
        tokens_per_round=num_tokens / num_rounds if num_rounds else 0.0,
        found_share=sum(outcome.num_cached_tokens for outcome in outcomes)
        / max(1, sum(outcome.num_prompt_tokens for outcome in outcomes)),
    )
