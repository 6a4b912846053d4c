"""Tables of profiles, plans and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from specray.planning.curves import Surface, interpolate
from specray.planning.profile import LinearTime, Profile
from specray.planning.search import FleetCandidate, FleetPlan
from specray.planning.simulation.results import Slo, Spread

if TYPE_CHECKING:
    from rich.table import Table

    from specray.loading.table import Room
    from specray.planning.models import ModelsPlan

_COUNTS = (1, 8, 32)
_DASH = "–"
_PLAN_CAPTION = (
    "goodput: tokens/s of requests within the SLO; TTFT, ITL: p50 / p95; target, draft: share of time at "
    "work; met: requests within the SLO; dim: not enough"
)


class CheckedLoad(Protocol):
    """Prediction and measurement of one load."""

    @property
    def concurrency(self) -> int: ...

    @property
    def measured_tokens_per_s(self) -> float: ...

    @property
    def measured_of_passes(self) -> tuple[float, ...]: ...

    @property
    def predicted_tokens_per_s(self) -> float: ...

    @property
    def measured_ttft_ms(self) -> float: ...

    @property
    def predicted_ttft_ms(self) -> float: ...

    @property
    def error(self) -> float: ...


def models_table(plan: ModelsPlan) -> Table:
    """Makes a table of several models, in the order in which they are asked for."""
    from rich.table import Table

    together = "all are loaded together" if plan.fits else "not all are loaded together"
    table = Table(
        *("model", "loaded", "priority", "GiB", "GPUs", "leaves for it", "problem"),
        title=f"{len(plan.loads)} models in {plan.room}: {together}",
        caption="each is asked for once, while none is used; GiB: estimated, then measured by the service",
    )
    for each in plan.loads:
        model = each.model
        priority = f"{model.priority}, pinned" if model.pinned else str(model.priority)
        when = "at the start" if each.is_at_start else "on demand"
        needs = (_gib(model.needs), f"{model.needs.gpus:g}")
        table.add_row(
            model.name, when, priority, *needs, ", ".join(each.leaving) or _DASH, each.problem or _DASH
        )
    table.add_section()
    table.add_row("all", "", "", _gib(plan.total), f"{plan.total.gpus:g}", "", "")
    return table


def models_json(plan: ModelsPlan) -> dict[str, Any]:
    """All that the table has."""
    return {
        "room_gib": plan.room.memory_bytes / 2**30,
        "num_gpus": plan.room.gpus,
        "total_gib": plan.total.memory_bytes / 2**30,
        "total_gpus": plan.total.gpus,
        "fits": plan.fits,
        "loads": [
            {
                "model": each.model.name,
                "gib": each.model.needs.memory_bytes / 2**30,
                "gpus": each.model.needs.gpus,
                "leaving": each.leaving,
                "problem": each.problem or None,
            }
            for each in plan.loads
        ],
    }


def _gib(room: Room) -> str:
    return f"{room.memory_bytes / 2**30:.2f}"


def profile_table(profile: Profile) -> Table:
    """Makes a table of what was measured, at a few sizes."""
    from rich.table import Table

    target, draft = profile.target, profile.draft
    table = Table("", *(f"{count} sequences" for count in _COUNTS), title=f"profile {profile.name}".strip())
    verify = [(one.num_rows, one.seconds) for one in target.verify]
    for rows in (1, 4):
        cells = (interpolate(verify, rows * count) + target.per_sequence_s * count for count in _COUNTS)
        table.add_row(f"verify, {rows} rows each, ms", *map(_ms, cells))
    if draft is not None:
        propose = Surface((one.num_tokens, one.num_sequences, one.seconds) for one in draft.propose)
        table.add_row("propose 3 tokens, ms", *(_ms(propose(3, count)) for count in _COUNTS))
        table.add_row("draft transport, ms", *_linear(draft.transport))
    table.add_row("target transport, ms", *_linear(target.transport))
    table.add_row("router, before a Verify, ms", *_linear(profile.router.verify_after_proposal))
    table.add_section()
    for engine, role in ((target, "target"), (draft, "draft")):
        if engine is not None:
            longest = engine.prefill[-1]
            table.add_row(
                f"{role}: {engine.hardware}", f"{longest.num_tokens} prompt tokens", _ms(longest.seconds), ""
            )
    for one in profile.acceptance:
        rates = " ".join(f"{rate:.2f}" for rate in one.by_position[:6])
        hits = " ".join(f"{hit.width}: {hit.rate:.2f}" for hit in one.hit_rates)
        table.add_row(f"acceptance, temperature {one.temperature:g}", rates, hits and f"hits {hits}", "")
    return table


def _linear(time: LinearTime) -> tuple[str, ...]:
    return tuple(_ms(time.of(count)) for count in _COUNTS)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def plan_table(plan: FleetPlan, *, has_prices: bool) -> Table:
    """Makes a table with one row per kind of fleet; the recommended one is marked."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    load = plan.demand.load
    letters = _letters(plan)
    numbers = ("groups", "drafts", "goodput", "TTFT ms", "ITL ms", "target", "draft", "met")
    table = Table(
        *([Column("on", no_wrap=True)] if len(letters) > 1 else []),
        *(Column(name, justify="right", no_wrap=True) for name in numbers),
        *([Column("found", justify="right", no_wrap=True)] if load.prefixes else []),
        Column("USD/h" if has_prices else "devices", justify="right", no_wrap=True),
        title=f"{load.rate_per_s:g} requests/s, {load.prompt.mean:.0f} prompt and {load.output.mean:.0f} "
        f"output tokens on average, temperature {load.temperature:g}",
        caption=_PLAN_CAPTION + "".join(f"; {letter}: {name}" for name, letter in letters.items()),
        box=SIMPLE_HEAD,
        padding=0,
    )
    for one in plan.candidates:
        run, offer = one.run, one.offer
        on = letters[offer.target_hardware]
        if offer.draft_hardware is not None:
            on += f" + {letters[offer.draft_hardware]}"
        table.add_row(
            *([on] if len(letters) > 1 else []),
            str(one.num_groups),
            str(one.num_drafts),
            f"{run.goodput_tokens_per_s:.0f}",
            _pair(run.ttft_ms),
            _pair(run.itl_ms),
            _percent(run.target_utilisation),
            _percent(run.draft_utilisation),
            _percent(run.met_share),
            *([_percent(run.found_share)] if load.prefixes else []),
            f"{one.cost:.2f}" if has_prices and one.cost < 1000 else f"{one.cost:.0f}",
            style=None if one.is_enough else "dim",
        )
    return table


def recommendation(plan: FleetPlan, *, has_prices: bool) -> str:
    """Says in one sentence what to buy, or that nothing that was tried is enough."""
    best, demand = plan.best, plan.demand
    fleet = _fleet_text(best)
    slo = _slo_text(demand.slo)
    if not best.is_enough:
        return (
            f"The load cannot be held{slo} with at most {demand.max_groups} target groups: the best found,"
            f" {fleet}, serves {best.run.goodput_tokens_per_s:.0f} of {best.run.offered_tokens_per_s:.0f}"
            f" tokens/s within it ({_percent(best.run.met_share)} of the requests)."
        )
    unit = f" for {best.cost:.2f} USD/h" if has_prices else ""
    text = f"Take {fleet}{unit}: it serves {demand.load.rate_per_s:g} requests/s{slo}"
    others = [
        one
        for one in plan.candidates
        if one.is_enough and one.drafts_per_group == 0 and one is not best and best.num_drafts
    ]
    if others:
        plain = min(others, key=lambda one: one.cost)
        cost = f" and {plain.cost:.2f} USD/h" if has_prices else ""
        text += f"; without drafts it takes {_groups_text(plain)}{cost}"
    if plan.whole is not None:
        text += f" (simulated whole: {_percent(plan.whole.met_share)} of the requests)"
    return f"{text}."


def check_table(rows: Sequence[CheckedLoad], *, temperature: float) -> Table:
    """Makes a table of predictions beside measurements."""
    from rich.table import Table

    table = Table(
        "clients",
        "measured tokens/s",
        "of passes",
        "predicted",
        "error",
        "TTFT ms",
        "predicted",
        title=f"prediction against measurement, temperature {temperature:g}",
    )
    for row in rows:
        table.add_row(
            str(row.concurrency),
            f"{row.measured_tokens_per_s:.0f}",
            " ".join(f"{rate:.0f}" for rate in row.measured_of_passes),
            f"{row.predicted_tokens_per_s:.0f}",
            f"{100 * row.error:+.1f} %",
            f"{row.measured_ttft_ms:.1f}",
            f"{row.predicted_ttft_ms:.1f}",
        )
    return table


def plan_json(plan: FleetPlan) -> dict[str, Any]:
    """Returns everything that was found, for ``--json``."""
    demand = plan.demand
    return {
        "rate_per_s": demand.load.rate_per_s,
        "mean_prompt_tokens": demand.load.prompt.mean,
        "mean_output_tokens": demand.load.output.mean,
        "temperature": demand.load.temperature,
        "slo": asdict(demand.slo),
        "seed": demand.seed,
        "is_enough": plan.best.is_enough,
        "recommended": _candidate_json(plan.best),
        "candidates": [_candidate_json(one) for one in plan.candidates],
        "whole_fleet": None if plan.whole is None else asdict(plan.whole),
    }


def _candidate_json(one: FleetCandidate) -> dict[str, Any]:
    offer = one.offer
    devices: dict[str, int] = {offer.target_hardware: one.num_groups * offer.kit.target.num_devices}
    if offer.kit.draft is not None and one.num_drafts:
        name = offer.kit.draft.hardware
        devices[name] = devices.get(name, 0) + one.num_drafts * offer.kit.draft.num_devices
    return {
        "target_hardware": offer.target_hardware,
        "draft_hardware": offer.draft_hardware,
        "drafts_per_group": float(one.drafts_per_group),
        "num_groups": one.num_groups,
        "num_drafts": one.num_drafts,
        "devices": devices,
        "cost": one.cost,
        "is_enough": one.is_enough,
        "capacity_tokens_per_s_of_a_group": one.capacity_tokens_per_s,
        "run": asdict(one.run) | {"met_share": one.run.met_share},
    }


def _letters(plan: FleetPlan) -> dict[str, str]:
    """Returns a letter for each kind of hardware, whose name would fill the table."""
    names = [
        name
        for one in plan.candidates
        for name in (one.offer.target_hardware, one.offer.draft_hardware)
        if name is not None
    ]
    return {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(names))}


def _fleet_text(one: FleetCandidate) -> str:
    if not one.num_drafts:
        return f"{_groups_text(one)} without drafts"
    drafts = f"{one.num_drafts} draft{'s' if one.num_drafts > 1 else ''} on {one.offer.draft_hardware}"
    return f"{_groups_text(one)} and {drafts} ({float(one.drafts_per_group):g} per group)"


def _groups_text(one: FleetCandidate) -> str:
    count = f"{one.num_groups} target group{'s' if one.num_groups > 1 else ''}"
    return f"{count} of {one.offer.kit.target.num_devices} x {one.offer.target_hardware}"


def _slo_text(slo: Slo) -> str:
    bounds = [
        f"{name} <= {bound:g} ms"
        for name, bound in (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms))
        if bound is not None
    ]
    return f" ({_percent(slo.share)} of them with {' and '.join(bounds)})" if bounds else ""


def _pair(values: Spread | None) -> str:
    return _DASH if values is None else f"{values.p50:.1f} / {values.p95:.1f}"


def _percent(share: float | None) -> str:
    return _DASH if share is None else f"{100 * share:.0f} %"
