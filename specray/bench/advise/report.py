"""The tables, the chart, the JSON and the configuration file of ``specray advise``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.table import Table

from specray.bench.advise.advice import Advice, Measured, Prediction, RankedEntry
from specray.bench.advise.figures import Likeness, Times
from specray.bench.core.chart import Panel, Series, draw
from specray.bench.core.report import DASH, grid_of, number, table_of
from specray.bench.methods.method import ALL, IN_TARGET
from specray.config import Config

_LIKENESS = ("accepted", "rejection sampling", "tau by K", "survival by depth")
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def advice_tables(advice: Advice) -> list[Table]:
    return [_ranking(advice), _changes(advice), _likeness(advice), _times(advice)]


def check_table(advice: Advice, speedups: Mapping[str, float]) -> Table:
    """Predicted and measured speed-ups of one request at a time, by the measured ones."""
    predicted = predicted_at_one(advice)
    ordered = sorted(speedups.items(), key=lambda pair: -pair[1])
    rows = [
        (name, f"{predicted[name]:.2f}x", f"{speedup:.2f}x", predicted[name] / speedup)
        for name, speedup in ordered
    ]
    title = f"one request at a time, temperature {advice.temperature:g}, K auto: speed-up"
    return grid_of(title, ["draft", "predicted", "measured", "predicted / measured"], rows)


def predicted_at_one(advice: Advice) -> dict[str, float]:
    """Predicted speed-ups of one request at a time, by candidate; empty: it was not asked for."""
    return {
        entry.name: one.speedup
        for entry in advice.entries
        for one in entry.predictions
        if one.concurrency == 1
    }


def advice_json(advice: Advice) -> dict[str, Any]:
    """Everything measured and predicted."""
    return {
        "temperature": advice.temperature,
        "concurrencies": list(advice.concurrencies),
        "largest_batch": advice.largest_batch,
        "winner": None if advice.winner is None else advice.winner.name,
        "plain": {
            "verify_s_by_rows": advice.plain.verify_s(),
            "tokens_per_s": {
                str(one.concurrency): one.tokens_per_s / one.speedup for one in advice.entries[0].predictions
            },
        },
        "ranking": [_entry_json(entry) for entry in advice.entries],
    }


def advice_config(advice: Advice, target: Config) -> str:
    """A configuration file that serves the winner, or the target alone where nothing pays."""
    best = advice.winner
    values = advice.serving_config(target).model_dump(mode="json", exclude_defaults=True)
    if best is None:
        head = f"# Predicted to be best at {advice.concurrencies[0]} at a time: the target alone."
    else:
        head = (
            f"# Predicted to be best at {best.first.concurrency} at a time: {best.name}, "
            f"{best.first.speedup:.2f} times plain decoding with K = {best.first.k}."
        )
        # What the advice is about stays in sight, also where it is the default.
        values.setdefault("target", {}).setdefault("model", best.measured.candidate.config.target.model)
        values.setdefault("draft", {}).setdefault("model", best.measured.candidate.config.draft.model)
    return f"{head}\n{yaml.safe_dump(values, sort_keys=False)}"


def advice_chart(advice: Advice) -> str:
    """Speed-up by concurrency, tokens per round by K and survival by depth, as SVG."""
    entries = advice.entries

    def lines(points: Sequence[tuple[tuple[float, float], ...]]) -> tuple[Series, ...]:
        return tuple(
            Series(entry.name, _COLORS[index % len(_COLORS)], entry.measured.candidate.tree != "off", own)
            for index, (entry, own) in enumerate(zip(entries, points, strict=True))
            if own
        )

    found = [entry.measured.at(advice.temperature) for entry in entries]
    panels = [
        Panel(
            "predicted speed-up",
            "requests at a time",
            "times plain decoding",
            lines([tuple((one.concurrency, one.speedup) for one in entry.predictions) for entry in entries]),
        ),
        Panel(
            "tau",
            "draft tokens per round (K)",
            "tokens per round",
            lines([tuple((one.k, one.tokens_per_round) for one in own) for own in found]),
        ),
        Panel(
            "survival",
            "draft tokens",
            "share of rounds that accept as many",
            lines([tuple((d + 1.0, share) for d, share in enumerate(own[-1].survival)) for own in found]),
        ),
    ]
    return draw(f"Drafts at temperature {advice.temperature:g}", panels, num_columns=3)


def _entry_json(entry: RankedEntry) -> dict[str, Any]:
    measured = entry.measured
    return {
        "name": entry.name,
        "predictions": [asdict(one) for one in entry.predictions],
        "stops_paying": entry.stops_paying,
        "latency_ratio": entry.latency_ratio,
        "change": None if entry.change is None else asdict(entry.change),
        "likeness": [_likeness_json(one) for one in measured.likenesses],
        "rejection": [_likeness_json(one) for one in measured.rejection],
        "verify_s_by_rows": measured.times.verify_s(),
        "draft_step_s_by_sequences": dict(_draft_steps(measured.times)),
    }


def _likeness_json(one: Likeness) -> dict[str, Any]:
    return {**asdict(one), "survival": one.survival}


def _ranking(advice: Advice) -> Table:
    table = Table(title=f"ranking at temperature {advice.temperature:g}, by tokens/s of one request")
    for name in ("", "draft"):
        table.add_column(name)
    for name in ("accepted", "draft/target", "K", "tau"):
        table.add_column(name, justify="right")
    for count in advice.concurrencies:
        table.add_column(f"tokens/s at {count}", justify="right")
    table.add_column("pays below", justify="right")
    plain = [one.tokens_per_s / one.speedup for one in advice.entries[0].predictions]
    for place, entry in enumerate(advice.entries, 1):
        best = entry.first
        likeness = next(one for one in entry.measured.at(advice.temperature) if one.k == best.k)
        table.add_row(
            str(place),
            entry.name,
            f"{likeness.acceptance:.2f}",
            number(entry.latency_ratio),
            str(best.k),
            f"{best.tau:.2f}",
            *(_prediction(one) for one in entry.predictions),
            DASH
            if entry.stops_paying == 1
            else f"> {advice.largest_batch}"
            if entry.stops_paying is None
            else str(entry.stops_paying),
        )
    table.add_row("", "plain decoding", *([DASH] * 4), *(f"{one:.1f}" for one in plain), "")
    table.caption = (
        "K: the best at the first concurrency; in brackets: predicted speed-up over plain decoding; pays "
        "below: batch from which no K is predicted to gain; ~: from step times of smaller batches"
    )
    return table


def _prediction(one: Prediction) -> str:
    return f"{'~' if one.is_extrapolated else ''}{one.tokens_per_s:.1f} ({one.speedup:.2f}x, K {one.k})"


def _changes(advice: Advice) -> Table:
    columns: dict[str, Callable[[RankedEntry], object]] = {
        "draft": lambda entry: entry.name,
        "a faster draft (trimmed vocabulary, int4 weights)": _faster,
        "a likelier draft (fine-tuning on the domain)": _likelier,
    }
    title = f"what would make it the best at {advice.concurrencies[0]} at a time, each alone"
    return table_of(title, columns, advice.entries, text=columns)


def _faster(entry: RankedEntry) -> str:
    if entry.change is None:
        return "it is"
    if not entry.measured.times.has_draft_steps:
        is_inside = entry.measured.candidate.kind in IN_TARGET
        return "its steps are part of the target's" if is_inside else "its drafts take no time"
    if entry.change.draft_factor is None:
        return "no draft step is short enough"
    return f"steps at most {entry.change.draft_factor:.2f} times as long"


def _likelier(entry: RankedEntry) -> str:
    change = entry.change
    if change is None:
        return "it is"
    if change.acceptance is None or change.rejections is None:
        return "no acceptance is high enough"
    return f"acceptance {change.acceptance:.2f}: {change.rejections:.2f} of its rejections left"


def _likeness(advice: Advice) -> Table:
    rows = []
    for own in (entry.measured for entry in advice.entries):
        for temperature, domain in dict.fromkeys((one.temperature, one.domain) for one in own.likenesses):
            found = own.at(temperature, domain)
            rows.append(
                (
                    f"{temperature:g}",
                    domain,
                    own.candidate.name,
                    number(found[-1].acceptance, 3),
                    _rejection(own, found[-1]),
                    "  ".join(f"{one.k}: {one.tokens_per_round:.2f}" for one in found),
                    "  ".join(f"{share:.2f}" for share in found[-1].survival),
                )
            )
    return grid_of(
        "acceptance: greedy at temperature 0, coupled above",
        ["temperature", "prompts", "draft", *_LIKENESS],
        rows,
        text=("prompts", "draft"),
        caption=f"accepted and survival: of the largest K; prompts {ALL}: all of them",
    )


def _rejection(own: Measured, like: Likeness) -> str:
    found = [one for one in own.rejection if one.temperature == like.temperature and like.domain == ALL]
    return f"{found[0].acceptance:.3f}" if found else ""


def _times(advice: Advice) -> Table:
    rows = [("any next to the target", _by_size(_verify_steps(advice.plain)), "")]
    for own in {entry.measured.candidate.timed_as: entry.measured for entry in advice.entries}.values():
        verify = _verify_steps(own.times) if own.candidate.kind in IN_TARGET else ()
        rows.append((own.candidate.timed_as, _by_size(verify), _by_size(_draft_steps(own.times))))
    headings = ["draft", "target step by rows: V", "draft step by sequences: D"]
    return grid_of(
        "step times in service, in ms",
        headings,
        filter(lambda row: any(row[1:]), rows),
        text=headings,
        caption=_experts(advice.plain),
    )


def _experts(times: Times) -> str:
    """What K costs on a mixture; empty: the target is none."""
    use = times.cost_model().target.experts
    if use.info is None:
        return ""
    hit = "; ".join(f"{rows}: {use.expected(rows, 1) / use.info.num_chosen:.2f}" for rows in (2, 4, 8))
    return (
        f"experts are {use.info.share:.2f} of a step of one row; rows of one sequence, and the experts that "
        f"they hit in multiples of one row's: {hit}"
    )


def _verify_steps(times: Times) -> Iterator[tuple[int, float]]:
    """Seconds of a target step by rows, as the service would predict them, up to the most measured."""
    cost = times.cost_model()
    rows = 1
    while rows <= max((one.num_rows for one in times.verify), default=0):
        yield rows, cost.verify_s(rows, min(rows, times.most_sequences)) or 0.0
        rows *= 2


def _draft_steps(times: Times) -> Iterator[tuple[int, float]]:
    if times.has_draft_steps:
        cost = times.cost_model()
        for count in sorted({one.num_sequences for one in times.verify}):
            yield count, cost.draft_step_s(count, 0.0)


def _by_size(values: Iterable[tuple[int, float]]) -> str:
    return "  ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in values)
