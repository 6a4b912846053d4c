"""Under rejection, draft tokens of the target's drafter leave the target's distribution as it is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from specray.draft_tokens import NO_DRAFT
from specray.types import SamplingParams, Verification
from tests.unit.engine.features.block.checkpoints import dspark
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.targets import Session, make_target, step
from tests.unit.engine.model.checkpoints import reference_logits, reference_model, write_checkpoint
from tests.unit.engine.sampling.p_values import chi_square_p_value

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
ALLOWED = (5, 7, 9)
TEMPERATURE = 12.0
NUM_SAMPLES = 1200


def expected(path: Path) -> dict[tuple[int, ...], float]:
    """Chance of each output of three tokens."""
    model, chances = reference_model(path), {}

    def chance(prefix: list[int], token: int) -> float:
        row = reference_logits(model, prefix)[-1][list(ALLOWED)].double() / TEMPERATURE
        return float(row.softmax(-1)[ALLOWED.index(token)])

    for output in product(ALLOWED, repeat=3):
        prefixes = [[*PROMPT, *output[:count]] for count in range(3)]
        chances[output] = float(math.prod(chance(*each) for each in zip(prefixes, output, strict=True)))
    return chances


DRAFTERS = {"EAGLE-3": official(eagle3_weights()), "DSpark": dspark().files}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_committed_tokens_follow_the_target(tmp_path: Path, kind: str) -> None:
    llama = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=3)
    drafter = write(tmp_path / "drafter", *DRAFTERS[kind])
    target = make_target(llama, drafter, max_num_seqs=64)
    sampling = SamplingParams(
        temperature=TEMPERATURE, allowed_token_ids=ALLOWED, verification=Verification.REJECTION
    )
    seen: Counter[tuple[int, ...]] = Counter()
    accepted: list[int] = []
    for first in range(0, NUM_SAMPLES, 60):
        sessions = [
            Session(str(seed), list(PROMPT), replace(sampling, seed=seed))
            for seed in range(first, first + 60)
        ]
        drafts = [NO_DRAFT] * len(sessions)
        for _ in range(3):
            verdicts = step(target, sessions, drafts, 2)
            drafts = [verdict.draft for verdict in verdicts]
            assert all(len(draft.probs) == len(draft) == 2 for draft in drafts)
        for session in sessions:
            seen[tuple(session.token_ids[len(PROMPT) :][:3])] += 1
            accepted += session.accepted[1:]
        target.release([session.request_id for session in sessions])
    wanted = expected(llama)
    assert set(seen) <= set(wanted) and {0, 1, 2} == set(accepted)
    observed = [seen[output] for output in wanted]
    assert chi_square_p_value(observed, [NUM_SAMPLES * chance for chance in wanted.values()]) > 1e-3
