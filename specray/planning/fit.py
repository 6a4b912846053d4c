"""Fits the curves of a profile to the samples of traces."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import mean, median
from typing import Any, TypeVar

from specray.control.experts import ExpertUse
from specray.engine_info import EngineInfo
from specray.planning.curves import (
    MAX_JUMP,
    Point,
    Surface,
    average,
    cell_of,
    cell_points,
    fit_linear,
    interpolate,
    line_through,
    rising,
)
from specray.planning.profile import (
    INFO_FIELDS,
    AcceptanceProfile,
    ContextPoint,
    DraftProfile,
    ExpertsProfile,
    HitRate,
    LinearTime,
    OutcomesPoint,
    PrefillPoint,
    ProposePoint,
    RouterProfile,
    StepTimePoint,
    TargetProfile,
    VerifyPoint,
)
from specray.planning.samples import DraftSample, Samples, Sweep, TargetSample, is_beside

_MIN_SAMPLES = 3
"""Least number of samples per size; fewer say nothing."""
_NUM_QUANTILES = 20

SampleT = TypeVar("SampleT", TargetSample, DraftSample)


def fit_target(sweep: Sweep, info: EngineInfo, *, hardware: str) -> TargetProfile:
    """Fits the target's profile. The sweep must hold at least some steps and prefills."""
    decoded = [[step for step in samples.target if _is_decode(step)] for samples in sweep.rounds]
    experts = _expert_use(itertools.chain.from_iterable(decoded), info)

    def factor(step: TargetSample) -> float:
        counted = step.num_experts
        return (
            experts.expected_factor(step.num_rows, step.num_sequences)
            if counted is None
            else experts.factor(counted)
        )

    passes = [[replace(step, forward_s=step.forward_s / factor(step)) for step in one] for one in decoded]
    steps = list(itertools.chain.from_iterable(passes))
    per_sequence_s = _sequence_slope(passes)
    points = cell_points(
        passes,
        place=lambda step: (float(step.num_rows), 0),
        value=lambda step: max(1e-6, step.forward_s - per_sequence_s * step.num_sequences),
    )
    curve = [(point.size, point.seconds) for point in rising(points)]

    def rows_s(step: TargetSample) -> float:
        return interpolate(curve, step.num_rows) + per_sequence_s * step.num_sequences

    def expected_s(step: TargetSample) -> float:
        return factor(step) * rows_s(step)

    def transport(*, is_plain: bool) -> LinearTime:
        return fit_linear(
            [(step.num_sequences, step.transport_s) for step in one if step.is_after_proposal is not is_plain]
            for one in passes
        )

    plain, drafted = transport(is_plain=True), transport(is_plain=False)
    context_len = mean(step.num_context_tokens / step.num_sequences for step in steps)
    prefill = _prefill_points(_first_chunks(sweep.plain_prefills), lambda step: step.num_rows)
    prompts = [(float(point.num_tokens), point.seconds) for point in prefill]
    longer = {
        (k + 1, length): [step for step in samples.target if not step.num_prefill_rows]
        for (k, length), samples in sweep.long_context.items()
    }
    return TargetProfile(
        **_common(info, hardware),
        prefill=prefill,
        context=_context_points(longer, expected_s, context_len),
        transport=plain if drafted == LinearTime() else drafted,
        plain_transport=plain,
        slowdown_beside_draft=_slowdown(
            [step for step in sweep.overlapped.target if not step.num_prefill_rows], expected_s
        ),
        step_spread=_spread(step.forward_s / rows_s(step) for step in steps),
        transport_spread=_spread(
            step.transport_s
            / max(1e-6, (drafted if step.is_after_proposal else plain).of(step.num_sequences))
            for step in steps
        ),
        prompt_slowdown_beside_draft=_slowdown(
            _first_chunks(sweep.prefills), lambda step: interpolate(prompts, step.num_rows)
        ),
        prompt_wait_s=_prompt_wait_s(sweep, plain),
        verify=tuple(VerifyPoint(num_rows=rows, seconds=seconds) for rows, seconds in curve),
        per_sequence_s=per_sequence_s,
        experts=_experts_profile(experts),
    )


def _expert_use(steps: Iterable[TargetSample], info: EngineInfo) -> ExpertUse:
    use = ExpertUse(info.experts)
    for step in steps:
        if step.num_experts is not None:
            use.add(step.num_rows, step.num_sequences, step.num_experts)
    return use


def _experts_profile(use: ExpertUse) -> ExpertsProfile | None:
    if use.info is None:
        return None
    return ExpertsProfile(
        **asdict(use.info),
        sequences_exponent=use.sequences_exponent,
        rows_exponent=use.rows_exponent,
    )


def _prompt_wait_s(sweep: Sweep, transport: LinearTime) -> float:
    """Returns the seconds that a prompt, served alone, waits beyond its forwards and the usual transport."""
    steps = _first_chunks(sweep.prefills) or _first_chunks(sweep.plain_prefills)
    waits = [step.gap_s + step.transport_s - transport.of(1) for step in steps if step.gap_s is not None]
    return max(0.0, median(waits)) if len(waits) >= _MIN_SAMPLES else 0.0


def fit_draft(sweep: Sweep, info: EngineInfo, *, hardware: str) -> DraftProfile:
    """Fits the draft's profile; see ``fit_target``."""
    passes = [[step for step in samples.draft if _is_proposing(step)] for samples in sweep.rounds]
    steps = list(itertools.chain.from_iterable(passes))
    points = rising(
        cell_points(
            passes,
            place=lambda step: (float(step.num_sequences), step.num_tokens),
            value=lambda step: step.forward_s,
        )
    )
    surface = Surface((point.depth, point.size, point.seconds) for point in points)

    def expected_s(step: DraftSample) -> float:
        return surface(step.num_tokens, step.num_sequences)

    enumerated = [step for step in sweep.overlapped.draft if _is_plain(step) and step.num_branches]
    outcomes = cell_points(
        [enumerated],
        place=lambda step: (float(step.num_branches), step.num_tokens),
        value=lambda step: step.forward_s,
    )
    context_len = mean(step.num_context_tokens / step.num_sequences for step in steps)
    transport = fit_linear([(step.num_sequences, step.transport_s) for step in one] for one in passes)
    longer = {
        (1, length): [step for step in samples.draft if _is_proposing(step)]
        for (k, length), samples in sweep.long_context.items()
        if k
    }
    return DraftProfile(
        **_common(info, hardware),
        prefill=_prefill_points(
            [step for step in sweep.prefills.draft if step.is_prefill], lambda step: step.num_new_tokens
        ),
        context=_context_points(longer, expected_s, context_len),
        transport=transport,
        step_spread=_spread(step.forward_s / expected_s(step) for step in steps),
        transport_spread=_spread(
            step.transport_s / max(1e-6, transport.of(step.num_sequences)) for step in steps
        ),
        slowdown_beside_target=_slowdown(
            [step for step in sweep.overlapped.draft if _is_plain(step) and not step.num_branches], expected_s
        ),
        propose=tuple(
            ProposePoint(num_sequences=point.size, num_tokens=point.depth, seconds=point.seconds)
            for point in points
        ),
        outcomes=tuple(
            OutcomesPoint(num_branches=point.size, num_tokens=point.depth, seconds=point.seconds)
            for point in outcomes
        ),
    )


def fit_router(sweep: Sweep) -> RouterProfile:
    """Fits the router's own time between messages."""

    def before_verify(*, is_after_proposal: bool) -> LinearTime:
        return fit_linear(
            [
                (step.num_sequences, step.gap_s)
                for step in samples.target
                if not step.num_prefill_rows
                and step.gap_s is not None
                and step.is_after_proposal is is_after_proposal
            ]
            for samples in sweep.rounds
        )

    return RouterProfile(
        verify_after_verdict=before_verify(is_after_proposal=False),
        verify_after_proposal=before_verify(is_after_proposal=True),
        ask_after_verdict=fit_linear(
            [
                (step.num_sequences, step.gap_s)
                for step in samples.draft
                if _is_proposing(step) and step.gap_s is not None
            ]
            for samples in sweep.rounds
        ),
    )


def fit_acceptance(sweep: Sweep) -> tuple[AcceptanceProfile, ...]:
    """Computes acceptance rates by position, for each temperature at which something was verified."""
    profiles = []
    for temperature, samples in sorted(sweep.acceptance.items()):
        if not samples.rounds:
            continue
        hits = sweep.hits.get(temperature, {})
        profiles.append(
            AcceptanceProfile(
                temperature=temperature,
                by_position=rates_by_position(samples.rounds),
                num_rounds=len(samples.rounds),
                outputs=tuple(sweep.outputs.get(temperature, ())),
                hit_rates=tuple(
                    HitRate(width=width, rate=found / lookups, num_lookups=lookups)
                    for width, (found, lookups) in sorted(hits.items())
                    if lookups
                ),
            )
        )
    return tuple(profiles)


def rates_by_position(rounds: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """Returns for each i the share of rounds that accepted draft token i, among those that reached it."""
    tried: defaultdict[int, int] = defaultdict(int)
    kept: defaultdict[int, int] = defaultdict(int)
    for num_drafts, num_accepted in rounds:
        for position in range(min(num_drafts, num_accepted + 1)):
            tried[position] += 1
            kept[position] += position < num_accepted
    rates: list[float] = []
    for position in range(len(tried)):
        # Least number of rounds that reached a position, for a rate of its own; later positions take the rate
        # before them.
        if position and tried[position] < 10:
            break
        rates.append(kept[position] / tried[position])
    return tuple(rates)


def _sequence_slope(passes: Sequence[Sequence[TargetSample]]) -> float:
    """Returns the seconds per sequence of a step, from steps of equal rows with more sequences."""
    points = cell_points(
        passes,
        place=lambda step: (float(step.num_rows), step.num_sequences),
        value=lambda step: step.forward_s,
    )
    by_rows: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        by_rows.setdefault(cell_of(point.size), []).append((point.depth, point.seconds))
    pairs: list[tuple[float, float]] = []
    weights: list[float] = []
    for members in by_rows.values():
        count, seconds = (mean(values) for values in zip(*members, strict=True))
        pairs += [(one - count, other - seconds) for one, other in members]
        # Errors are relative to the time.
        weights += [1 / max(seconds, 1e-6) ** 2] * len(members)
    return line_through(pairs, weights)[1] if pairs else 0.0


def _prefill_points(
    steps: Sequence[SampleT], num_tokens: Callable[[SampleT], int]
) -> tuple[PrefillPoint, ...]:
    cells: dict[int, list[tuple[int, float]]] = {}
    for step in steps:
        if step.forward_s > 0 and num_tokens(step) > 0:
            cells.setdefault(cell_of(num_tokens(step)), []).append((num_tokens(step), step.forward_s))
    points = []
    for _, members in sorted(cells.items()):
        counts, seconds = zip(*members, strict=True)
        points.append(Point(round(mean(counts)), 0, average(seconds), len(members)))
    return tuple(PrefillPoint(num_tokens=int(one.size), seconds=one.seconds) for one in rising(points))


def _context_points(
    loads: Mapping[tuple[int, int], Sequence[SampleT]],
    expected_s: Callable[[SampleT], float],
    context_len: float,
) -> tuple[ContextPoint, ...]:
    """Returns by how much steps with long contexts exceed those with contexts of ``context_len``.

    Args:
        loads: samples by rows per sequence and prompt length.
        expected_s: returns the seconds of a step with a context of ``context_len``.
        context_len: context in tokens of the steps that were timed first.
    """
    points: list[ContextPoint] = []
    for rows in sorted({rows for rows, _ in loads}):
        points.append(ContextPoint(num_tokens=context_len, rows_per_sequence=rows, seconds=0.0))
        for key in sorted(key for key in loads if key[0] == rows):
            longer = [s for s in loads[key] if s.num_context_tokens > s.num_sequences * context_len]
            if not longer:
                continue
            expected = mean(expected_s(step) / step.num_sequences for step in longer)
            extra = average(step.forward_s / step.num_sequences for step in longer) - expected
            length = mean(step.num_context_tokens / step.num_sequences for step in longer)
            # A longer context does not make a step faster.
            more = max(points[-1].seconds, extra)
            points.append(ContextPoint(num_tokens=length, rows_per_sequence=rows, seconds=more))
    return tuple(points)


def _slowdown(steps: Sequence[SampleT], expected_s: Callable[[SampleT], float]) -> float:
    """Returns the factor by which a step slows down while the other engine works, too.

    A second while the other engine works is worth 1 / slowdown; the rest is what the step took longer.
    """
    lost = [(step.forward_s - expected_s(step)) / step.beside_s for step in steps if is_beside(step)]
    if len(lost) < _MIN_SAMPLES:
        return 1.0
    return 1 / (1 - min(0.8, max(0.0, median(lost))))


def _spread(ratios: Iterable[float]) -> tuple[float, ...]:
    known = sorted(ratios)
    if len(known) < _NUM_QUANTILES:
        return ()
    most = MAX_JUMP * median(known)
    picked = [
        min(most, known[int((index + 0.5) / _NUM_QUANTILES * len(known))]) for index in range(_NUM_QUANTILES)
    ]
    middle = mean(picked)
    return tuple(round(one / middle, 3) for one in picked) if middle > 0 else ()


def _first_chunks(samples: Samples) -> list[TargetSample]:
    return [step for step in samples.target if step.num_prefill_rows and not step.num_context_tokens]


def _is_decode(step: TargetSample) -> bool:
    return not step.num_prefill_rows and not is_beside(step)


def _is_proposing(step: DraftSample) -> bool:
    return _is_plain(step) and not step.num_branches and not is_beside(step)


def _is_plain(step: DraftSample) -> bool:
    return not step.is_prefill and not step.is_mixed and step.num_tokens > 0 and step.forward_s > 0


def _common(info: EngineInfo, hardware: str) -> dict[str, Any]:
    return {
        **{name: getattr(info, name) for name in INFO_FIELDS},
        "hardware": hardware,
        "num_devices": info.tensor_parallel_size,
        "step_times": tuple(StepTimePoint(**asdict(one)) for one in info.step_times),
    }
