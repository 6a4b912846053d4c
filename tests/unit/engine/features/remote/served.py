"""Requests that a Router serves with a target and a drafter of its features in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams
from tests.unit.engine import served
from tests.unit.engine.features.targets import GREEDY, Session, generate, make_target
from tests.unit.engine.served import COUPLED, NUM_OUTPUT, Outputs, TimedDraft, TimedTarget

PROMPTS = {"short": [5, 6, 7], "long": [(7 * index) % 90 + 3 for index in range(40)], "single": [11]}


def written_alone(path: Path) -> Outputs:
    """What a target writes by itself: of each prompt, greedy and coupled."""
    target, outputs = make_target(path, None), {}
    for name, prompt in PROMPTS.items():
        for is_greedy in (True, False):
            sampling = replace(
                GREEDY if is_greedy else SamplingParams(**COUPLED), num_prompt_tokens=len(prompt)
            )
            session = Session(f"{name} {is_greedy}", list(prompt), sampling)
            outputs[name, is_greedy] = tuple(generate(target, session, NUM_OUTPUT, 0))
            target.release([session.request_id])
    return outputs


def serve(
    engines: tuple[TargetEngine, FeatureDraftEngine],
    alone: Outputs,
    *,
    is_greedy: bool = False,
    lost: Sequence[int] = (),
    together: bool = False,
    **options: Any,
) -> tuple[TimedTarget, TimedDraft, float]:
    """Serves all requests; returns the number of accepted tokens, too."""
    target, draft = TimedTarget(engines[0], lost), TimedDraft(engines[1])
    found = served.serve(target, draft, PROMPTS, alone, is_greedy=is_greedy, together=together, **options)
    assert target.info.num_blocks_in_use == draft.info.num_blocks_in_use == 0
    return target, draft, found.accepted
