"""By rejection the output is not the target's own, but distributed as the target's: whatever drafts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from specray.draft_tokens import DraftTokens
from specray.engine.drafting.engine import DraftEngine
from specray.engine.target.engine import TargetEngine
from specray.types import Verification
from tests.conformance.test_toy_engines import DEVICES, use_device_samplers
from tests.pairwise import pairs
from tests.unit.engine.draft_view.toys import toy_viewer
from tests.unit.engine.harness import (
    TARGET,
    VOCAB_SIZE,
    Session,
    generate_overlapped,
    generate_serial,
    generate_together,
    model_logits,
    propose_all,
    table,
    toy_draft,
    toy_target,
    verify_all,
)
from tests.unit.engine.sampling.p_values import chi_square_p_value
from tests.unit.engine.samplings import (
    FANOUTS,
    NUM_OUTPUT,
    PROCESSED,
    PROMPT,
    REJECTION,
    exact_probabilities,
    session,
)
from tests.unit.engine.trees.drafters import engine_drafter

SAMPLING = replace(REJECTION, temperature=1.5, top_k=3, presence_penalty=1.0)
AT_ONCE = 50
ROOM = {"max_num_seqs": AT_ONCE, "num_blocks": 2000, "max_num_batched_tokens": 1000}
Outputs = Callable[[Sequence[Session]], Sequence[Sequence[int]]]


def check_distribution(
    outputs_of: Outputs, heads: Sequence[TargetEngine | DraftEngine], *, num_tokens: int, num_samples: int
) -> list[Session]:
    """Outputs of many seeds against the exact chances of all outputs; returns the sessions."""
    exact = exact_probabilities(SAMPLING, num_tokens)
    seen: Counter[tuple[int, ...]] = Counter()
    done: list[Session] = []
    for first in range(0, num_samples, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        sessions = [session(replace(SAMPLING, seed=seed), request_id=str(seed)) for seed in seeds]
        seen.update(tuple(output) for output in outputs_of(sessions))
        for head in heads:
            head.release([each.request_id for each in sessions])
        done += sessions
    assert set(seen) <= set(exact)
    observed = [seen[output] for output in exact]
    assert chi_square_p_value(observed, [num_samples * chance for chance in exact.values()]) > 1e-3
    return done


def in_rounds(
    target: TargetEngine, draft: Callable[[Sequence[Session]], Sequence[DraftTokens]], num_tokens: int
) -> Outputs:
    def outputs(sessions: Sequence[Session]) -> list[list[int]]:
        while going := [each for each in sessions if len(each.token_ids) < len(PROMPT) + num_tokens]:
            verify_all(target, going, draft(going))
        return [each.token_ids[len(PROMPT) :][:num_tokens] for each in sessions]

    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("fanout", ["ahead", "enumerated"])
def test_sampled_drafts_and_branches_before_the_verdict(fanout: str) -> None:
    target, draft = toy_target(**ROOM)[0], toy_draft(table(error=1.5), **ROOM)[0]
    done = check_distribution(
        lambda sessions: generate_together(target, draft, sessions, 3, 1, FANOUTS[fanout]),
        (target, draft),
        num_tokens=3,
        num_samples=1500,
    )
    assert {number for each in done for number in each.accepted} == {0, 1}
    assert {is_hit for each in done for is_hit in each.hits} == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["intersect", "retokenize"])
def test_drafts_of_other_tokens(mode: Literal["intersect", "retokenize"]) -> None:
    """The draft's probabilities are those of the tokens that both have; of a text there are none."""
    target, draft = toy_target(**ROOM)[0], toy_viewer(mode, table(error=1.5), **ROOM)[0]
    outputs = in_rounds(target, lambda going: propose_all(draft, going, 2), 2)
    done = check_distribution(outputs, (target, draft), num_tokens=2, num_samples=500)
    assert {number for each in done for number in each.accepted} >= {0, 1, 2}


def test_trees_that_were_chosen_without_randomness() -> None:
    """Of the likeliest tokens and of others."""
    target, _ = toy_target(**ROOM)
    outputs = in_rounds(target, lambda going: [likely_tree(tuple(each.token_ids)) for each in going], 3)
    done = check_distribution(outputs, (target,), num_tokens=3, num_samples=800)
    assert {number for each in done for number in each.accepted} == {0, 1, 2}


@functools.cache
def likely_tree(prefix: tuple[int, ...]) -> DraftTokens:
    """A function of the prefix alone: its first, third and sixth likeliest tokens, and what follows two."""
    first, second, third = (int(model_logits(TARGET, prefix).topk(6).indices[i]) for i in (0, 2, 5))
    after = [int(model_logits(TARGET, [*prefix, token]).argmax()) for token in (first, second)]
    tokens = (third, first, second, *after, (after[0] + 1) % VOCAB_SIZE)
    return DraftTokens(tokens, (-1, -1, -1, 1, 2, 1))


@pairs(
    sampling={"plain": REJECTION, "processed": replace(PROCESSED, verification=Verification.REJECTION)},
    num_drafts=(0, 1, 3, 4),
    device=DEVICES,
)
def test_a_perfect_draft_is_always_accepted(
    sampling: Any, num_drafts: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device_samplers(device, monkeypatch)
    target, draft, current = toy_target()[0], toy_draft(TARGET)[0], session(sampling)
    generate_serial(target, engine_drafter(draft), current, NUM_OUTPUT, num_drafts)
    assert set(current.accepted) == {num_drafts}


def test_an_output_repeats_with_the_same_seed_and_not_with_another() -> None:
    def output(seed: int) -> list[int]:
        current = session(replace(REJECTION, seed=seed))
        return generate_overlapped(
            toy_target()[0], toy_draft()[0], current, NUM_OUTPUT, 3, FANOUTS["enumerated"]
        )

    assert output(1) == output(1)
    assert output(1) != output(2)
