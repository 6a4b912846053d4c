"""A prompt for tests of both heads, the ways to sample after it, and what the target alone answers."""

from __future__ import annotations

import functools
from dataclasses import replace

from specray.engine.drafting.engine import DraftEngine
from specray.engine.sampling.processors import process_logits
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams, Verification
from tests.unit.engine.harness import TARGET, Session, model_logits, target_only
from tests.unit.engine.sampling.rows import row_group

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NUM_OUTPUT = 24
"""Output tokens: twice the first that ``PROCESSED`` cannot stop at, over six blocks of four."""
GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT))
COUPLED = SamplingParams(seed=77, num_prompt_tokens=len(PROMPT))
REJECTION = replace(COUPLED, verification=Verification.REJECTION)
PROCESSED = replace(
    COUPLED,
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((7, 2.0), (8, -100.0)),
    min_tokens=12,
    stop_token_ids=(2, 11),
)
BAD_WORDS = replace(PROCESSED, bad_words=((4, 9), (7, 7, 3), (16,), (20, 5)))
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy-processed": replace(PROCESSED, temperature=0.0),
    "coupled": COUPLED,
    "coupled-processed": PROCESSED,
}


def session(sampling: SamplingParams = GREEDY, *, request_id: str = "a") -> Session:
    return Session(request_id, list(PROMPT), sampling)


def expected_output(sampling: SamplingParams, num_output: int = NUM_OUTPUT) -> list[int]:
    return list(_expected_output(sampling, num_output))


@functools.cache
def _expected_output(sampling: SamplingParams, num_output: int) -> tuple[int, ...]:
    return tuple(target_only(lambda prefix: model_logits(TARGET, prefix), PROMPT, sampling, num_output))


def exact_probabilities(sampling: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Of every possible output of the target alone."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for output, probability in found.items():
            prefix = [*PROMPT, *output]
            row = process_logits(model_logits(TARGET, prefix)[None], [row_group(sampling, prefix, 1)])[0]
            for token_id, factor in enumerate(row.double().softmax(-1).tolist()):
                if factor > 0.0:
                    longer[*output, token_id] = probability * factor
        found = longer
    return found


def assert_all_free(head: TargetEngine | DraftEngine) -> None:
    head.release(["a", "b", "c", "d"])
    head.check_integrity()
    assert head.info.num_blocks_in_use == 0


FANOUTS = {
    "ahead": lambda num_drafts: (0,) * num_drafts + (1,),
    "enumerated": lambda num_drafts: (2,) * num_drafts + (3,),
    "first-only": lambda num_drafts: (4,),
    "holes": lambda num_drafts: tuple(2 * (n % 2) for n in range(num_drafts + 1)),
}
