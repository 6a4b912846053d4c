"""Measures what the advice predicts: the speed-up over plain decoding, one request at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specray.bench.advise.candidate import Candidate, on_targets, processes_of, without_draft
from specray.bench.advise.measure import MeasurePlan, Show
from specray.bench.methods.method import ALL, PLAIN, Method
from specray.bench.methods.run import measure_methods
from specray.config import Config
from specray.types import DraftKind


async def measured_speedups(
    target: Config, candidates: Sequence[Candidate], plan: MeasurePlan, show: Show
) -> dict[str, float]:
    """Speed-ups by the name of the candidate, at the plan's first temperature and with K ``auto``.

    Each is over plain decoding of the same target process, in turns with it.

    Args:
        target: configuration of the target; its draft is of no account.
        candidates: with this target; a drafter on the target has a target process of its own.

    Raises:
        ConfigError, EngineLostError, SpecrayError: as ``measure_methods``.
    """
    alone = [one for one in candidates if one.kind is not DraftKind.FEATURES]
    groups = [(without_draft(target), alone), *on_targets(candidates)]
    num_methods = sum(1 + len(group) for _, group in groups)
    num_all = (plan.num_passes + 1) * len(plan.prompts) * num_methods
    number = itertools.count()
    speedups: dict[str, float] = {}
    for config, group in groups:
        processes = processes_of(group)
        rows = await measure_methods(
            config,
            [Method.parse(PLAIN), *(one.method(processes.get(one.timed_as, "")) for one in group)],
            plan.prompts,
            temperatures=plan.temperatures[:1],
            max_tokens=plan.max_tokens,
            num_repeats=plan.num_passes,
            on_progress=lambda text: show(text, next(number), num_all),
            other_drafts={
                processes[one.timed_as]: one.config for one in group if one.kind is DraftKind.MODEL
            },
        )
        speedups |= {row.method: row.speedup for row in rows if row.category == ALL and row.speedup}
    speedups.pop(PLAIN, None)
    return speedups
