"""Finds the cheapest fleet that holds a load, by one simulation after another.

A large fleet consists of equal cells (some groups and the drafts that they share), so at most
``_CELL_GROUPS`` groups are simulated with their part of the load. Requests are sent to routers at random, so
a cell of eight differs little from the whole. The recommended fleet is then simulated whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from specray.planning.hardware import Offer
from specray.planning.load import OpenLoad
from specray.planning.simulation.results import RunResult, Slo, TimeWindow
from specray.planning.simulation.runs import simulate, simulate_saturated

_CELL_GROUPS = 8
_MAX_WHOLE_REQUESTS = 10_000
"""Requests up to which the whole fleet is simulated."""
_MAX_SATURATING = 128
"""Sessions per group in the run that finds its limit."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The load that a fleet has to hold, and its SLO."""

    load: OpenLoad
    slo: Slo
    max_groups: int = 256
    seed: int = 0
    # Requests per window; enough for the share that meets the SLO.
    num_requests: int = 200


@dataclass(frozen=True, slots=True)
class FleetCandidate:
    """One fleet that holds the load, or the nearest to it that was found."""

    offer: Offer
    drafts_per_group: Fraction
    num_groups: int
    num_drafts: int
    is_enough: bool
    run: RunResult
    """Results of a cell, with the rates of the whole fleet."""
    capacity_tokens_per_s: float
    """Tokens/s of one saturated group."""

    @property
    def cost(self) -> float:
        return self.offer.cost(self.num_groups, self.num_drafts)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Results of a search."""

    demand: Demand
    candidates: tuple[FleetCandidate, ...]
    best: FleetCandidate
    """The cheapest fleet that is enough, or else the one that meets the SLO for most requests."""
    whole: RunResult | None
    """Results of the best fleet simulated whole; None: its cell is the whole, or it would take too long."""


def make_plan(
    offers: Sequence[Offer],
    ratios: Sequence[Fraction],
    demand: Demand,
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> FleetPlan:
    """Searches every offer with every number of drafts per group.

    Args:
        offers: kinds of fleets.
        ratios: drafts per target group; 0 is plain decoding.
        demand: the load and its SLO.
        progress: called with the name of the next part.
    """
    candidates: list[FleetCandidate] = []
    plain_targets: set[str] = set()
    for offer in offers:
        for ratio in sorted(set(ratios)) if offer.kit.draft is not None else [Fraction(0)]:
            if ratio == 0:
                # Plain decoding is the same with every kind of draft.
                if offer.target_hardware in plain_targets:
                    continue
                plain_targets.add(offer.target_hardware)
            one = offer if ratio else offer.without_draft()
            candidates.append(_Search(one, ratio, demand, progress).run())
    enough = [candidate for candidate in candidates if candidate.is_enough]
    best = (
        min(enough, key=lambda one: (one.cost, one.num_groups))
        if enough
        else max(candidates, key=lambda one: one.run.met_share * one.run.goodput_tokens_per_s)
    )
    return FleetPlan(demand, tuple(candidates), best, _run_whole(best, demand, progress))


class _Search:
    """Search for the smallest number of groups of one kind."""

    def __init__(
        self, offer: Offer, ratio: Fraction, demand: Demand, progress: Callable[[str], None]
    ) -> None:
        self._offer = offer
        self._ratio = ratio
        self._demand = demand
        self._progress = progress
        self._runs: dict[int, RunResult] = {}
        groups = ratio.denominator
        drafts = ratio.numerator
        self._tell("saturated")
        limit = min(offer.kit.target.max_num_seqs, _MAX_SATURATING)
        load = demand.load
        self._saturated = simulate_saturated(
            offer.kit, load, sessions_per_group=limit, num_groups=groups, num_drafts=drafts, seed=demand.seed
        )
        self._capacity = self._saturated.tokens_per_s / groups
        self._latency_s = limit * load.output.mean / self._capacity

    def run(self) -> FleetCandidate:
        most = self._demand.max_groups
        wanted = self._demand.load.rate_per_s * self._demand.load.output.mean
        # Share of a saturated fleet's tokens that may be asked for: with more, queues would grow for ever,
        # which a short simulation might not show.
        low = max(1, math.ceil(wanted / (0.95 * self._capacity)))
        if low > most:
            return self._candidate(most, is_enough=False)
        # Upwards in growing steps; then the gap is halved.
        lacking, enough, step = low - 1, low, max(1, low // 8)
        while not self._is_enough(enough):
            if enough == most:
                return self._candidate(most, is_enough=False)
            lacking, enough, step = enough, min(most, enough + step), 2 * step
        while enough - lacking > 1:
            middle = (lacking + enough) // 2
            if self._is_enough(middle):
                enough = middle
            else:
                lacking = middle
        return self._candidate(enough, is_enough=True)

    def _is_enough(self, num_groups: int) -> bool:
        return self._result(num_groups).met_share >= self._demand.slo.share

    def _candidate(self, num_groups: int, *, is_enough: bool) -> FleetCandidate:
        num_drafts = num_drafts_for(num_groups, self._ratio)
        run = self._result(num_groups)
        return FleetCandidate(
            self._offer, self._ratio, num_groups, num_drafts, is_enough, run, self._capacity
        )

    def _result(self, num_groups: int) -> RunResult:
        run = self._runs.get(num_groups)
        if run is None:
            self._tell(f"{num_groups} groups")
            cell_groups, cell_drafts = cell_of(num_groups, self._ratio)
            share = cell_groups / num_groups
            load = replace(self._demand.load, rate_per_s=self._demand.load.rate_per_s * share)
            window = window_for(load.rate_per_s, self._latency_s, self._demand.num_requests)
            cell = simulate(
                self._offer.kit,
                load,
                window,
                num_groups=cell_groups,
                num_drafts=cell_drafts,
                slo=self._demand.slo,
                seed=self._demand.seed,
            )
            run = self._runs[num_groups] = cell.scaled(num_groups, num_drafts_for(num_groups, self._ratio))
        return run

    def _tell(self, what: str) -> None:
        on = f"{self._offer.target_hardware}, {float(self._ratio):g} drafts per group"
        self._progress(f"{on}: {what}")


def num_drafts_for(num_groups: int, ratio: Fraction) -> int:
    """Returns the drafts of a fleet: at least one where there are any."""
    return math.ceil(num_groups * ratio)


def cell_of(num_groups: int, ratio: Fraction) -> tuple[int, int]:
    """Returns (groups, drafts) to simulate for a fleet: a small one whole, else a part in proportion."""
    unit = ratio.denominator
    groups = unit * max(1, _CELL_GROUPS // unit)
    if num_groups <= _CELL_GROUPS or groups >= num_groups:
        return num_groups, num_drafts_for(num_groups, ratio)
    return groups, int(groups * ratio)


def window_for(rate_per_s: float, latency_s: float, num_requests: int) -> TimeWindow:
    """Returns a window long enough for this many requests, and for the slowest ones to end.

    Args:
        rate_per_s: requests per second.
        latency_s: seconds of a request in a saturated fleet.
        num_requests: number of requests.
    """
    return TimeWindow(1.5 * latency_s, max(num_requests / rate_per_s, latency_s))


def _run_whole(best: FleetCandidate, demand: Demand, progress: Callable[[str], None]) -> RunResult | None:
    if cell_of(best.num_groups, best.drafts_per_group)[0] == best.num_groups:
        return None
    load, kit = demand.load, best.offer.kit
    latency_s = min(kit.target.max_num_seqs, _MAX_SATURATING) * load.output.mean / best.capacity_tokens_per_s
    window = window_for(load.rate_per_s, latency_s, demand.num_requests)
    # Others arrive until the last request of the window has ended.
    if load.rate_per_s * (window.warmup_s + window.length_s + latency_s) > _MAX_WHOLE_REQUESTS:
        return None
    progress(f"the whole fleet: {best.num_groups} groups and {best.num_drafts} drafts")
    return simulate(
        kit,
        load,
        window,
        num_groups=best.num_groups,
        num_drafts=best.num_drafts,
        slo=demand.slo,
        seed=demand.seed,
    )
