"""Measures what the advice predicts: the speed-up over plain decoding, one request at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specray.bench.advise.candidate import Candidate, processes_of, without_draft
from specray.bench.advise.measure import MeasurePlan, Show
from specray.bench.methods.method import ALL, PLAIN, Method
from specray.bench.methods.run import measure_methods
from specray.config import Config
from specray.types import DraftKind


async def measured_speedups(
    target: Config, candidates: Sequence[Candidate], plan: MeasurePlan, show: Show
) -> dict[str, float]:
    """Speed-ups by the name of the candidate, at the plan's first temperature and with K ``auto``.

    Args:
        target: configuration of the target; its draft is of no account.
        candidates: those with a drafter on the target are left out: each has a target process of its own.

    Raises:
        ConfigError, EngineLostError, SpecrayError: as ``measure_methods``.
    """
    served = [one for one in candidates if one.kind is not DraftKind.FEATURES]
    processes = processes_of(served)
    methods = [Method.parse(PLAIN), *(one.method(processes.get(one.timed_as, "")) for one in served)]
    num_all = (plan.num_passes + 1) * len(plan.prompts) * len(methods)
    number = itertools.count()
    rows = await measure_methods(
        without_draft(target),
        methods,
        plan.prompts,
        temperatures=plan.temperatures[:1],
        max_tokens=plan.max_tokens,
        num_repeats=plan.num_passes,
        on_progress=lambda text: show(text, next(number), num_all),
        other_drafts={processes[one.timed_as]: one.config for one in served if one.kind is DraftKind.MODEL},
    )
    return {
        row.method: row.speedup for row in rows if row.category == ALL and row.speedup and row.method != PLAIN
    }
