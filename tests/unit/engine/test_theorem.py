"""The theorem: whatever the draft says, both heads together give the output of the target alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from specray.engine.draft import DraftEngine
from specray.types import SamplingParams, Verdict, Verification
from tests.unit.engine.harness import (
    CLOSE,
    TARGET,
    VOCAB_SIZE,
    Drafter,
    Session,
    commit,
    generate_overlapped,
    generate_serial,
    generate_together,
    model_logits,
    table,
    target_only,
    toy_draft,
    toy_target,
    verify_item,
)
from tests.unit.engine.p_values import chi_square_p_value
from tests.unit.engine.reading.toys import toy_reader
from tests.unit.engine.samplings import (
    FANOUTS,
    NUM_OUTPUT,
    PROCESSED,
    PROMPT,
    REJECTION,
    SAMPLINGS,
    assert_all_free,
    exact_probabilities,
    expected_output,
    session,
)
from tests.unit.engine.trees.drafters import (
    adversarial_drafter,
    dying_drafter,
    empty_drafter,
    engine_drafter,
    random_drafter,
    tree_drafter,
)

pytestmark = pytest.mark.slow

NUM_DRAFTS = range(9)
"""None, and up to two blocks of four slots."""

DRAFTERS = [
    "perfect",
    "close",
    "trimmed",
    "intersect",
    "retokenize",
    "window",
    "random",
    "tree",
    "adversarial",
    "empty",
    "dying",
]


NUM_SAMPLES = 1500
TRIMMED = (1, 3, 4, 5, 9, 12, 13, 17, 21)


def make_drafter(name: str, sampling: SamplingParams) -> tuple[Drafter, DraftEngine | None]:
    match name:
        case "perfect" | "close":
            draft, _ = toy_draft(TARGET if name == "perfect" else CLOSE)
            return engine_drafter(draft), draft
        case "trimmed":
            draft, _ = toy_draft(TARGET, token_ids=TRIMMED)
            return engine_drafter(draft), draft
        case "intersect" | "retokenize":
            reader, _ = toy_reader("intersect" if name == "intersect" else "retokenize")
            return engine_drafter(reader), reader
        case "window":
            reader, _ = toy_reader(window=6)
            return engine_drafter(reader), reader
        case "dying":
            draft, _ = toy_draft()
            return dying_drafter(draft, rounds=3), draft
        case "random":
            return random_drafter(VOCAB_SIZE), None
        case "tree":
            return tree_drafter(expected_output(sampling, NUM_OUTPUT + 9), len(PROMPT), VOCAB_SIZE), None
        case "adversarial":
            output = expected_output(sampling, NUM_OUTPUT + 9)
            return adversarial_drafter(output, len(PROMPT), VOCAB_SIZE), None
    return empty_drafter, None


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_the_targets_alone_with_any_draft(name: str, sampling: SamplingParams) -> None:
    expected = expected_output(sampling)
    target, _ = toy_target()
    # A drafter without draft tokens does not ask how many are wanted.
    for num_drafts in NUM_DRAFTS[: 1 if name == "empty" else None]:
        drafter, draft = make_drafter(name, sampling)
        current = session(sampling)
        assert generate_serial(target, drafter, current, NUM_OUTPUT, num_drafts) == expected
        if name == "perfect":
            assert set(current.accepted) == {num_drafts}
        if name == "adversarial":
            assert set(current.accepted) == {0}
        target.check_integrity()
        assert_all_free(target)
        if draft is not None:
            assert_all_free(draft)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("fanout", FANOUTS)
def test_output_is_the_targets_alone_with_overlap(fanout: str, sampling: SamplingParams) -> None:
    expected = expected_output(sampling)
    target, _ = toy_target()
    for num_drafts in NUM_DRAFTS:
        draft, _ = toy_draft() if num_drafts % 2 else toy_draft(token_ids=TRIMMED)
        current = session(sampling)
        output = generate_overlapped(target, draft, current, NUM_OUTPUT, num_drafts, FANOUTS[fanout])
        assert output == expected
        draft.check_integrity()
        assert_all_free(draft)
        assert_all_free(target)


def test_output_does_not_depend_on_who_shares_the_batch() -> None:
    """Prompts that are chunked, sampled items and recoveries of other requests in the same step."""
    target, _ = toy_target(max_num_batched_tokens=16)
    sessions = [
        Session(name, PROMPT[: 3 + i] * (i + 1), replace(sampling, num_prompt_tokens=(3 + i) * (i + 1)))
        for i, (name, sampling) in enumerate(zip("abcd", SAMPLINGS.values(), strict=True))
    ]
    prompts = [list(current.token_ids) for current in sessions]
    drafter = random_drafter(VOCAB_SIZE)
    for round_index in range(10):
        drafted = [drafter(current, (i + round_index) % 4) for i, current in enumerate(sessions)]
        items = [verify_item(current, tokens) for current, tokens in zip(sessions, drafted, strict=True)]
        replies = target.verify(items).replies
        assert [reply.request_id for reply in replies] == list("abcd")
        for current, tokens, reply in zip(sessions, drafted, replies, strict=True):
            assert isinstance(reply, Verdict)
            commit(current, tokens, reply)
        if round_index == 5:
            target.release(["b"])
            sessions[1].target_len = 0
    for current, prompt in zip(sessions, prompts, strict=True):
        count = len(current.token_ids) - len(prompt)
        assert current.token_ids[len(prompt) :] == target_only(
            lambda prefix: model_logits(TARGET, prefix), prompt, current.sampling, count
        )


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_perfect_draft_under_rejection_is_always_accepted(num_drafts: int) -> None:
    target, _ = toy_target()
    draft, _ = toy_draft(TARGET)
    sampling = replace(PROCESSED, verification=Verification.REJECTION)
    current = session(sampling)
    generate_serial(target, engine_drafter(draft), current, NUM_OUTPUT, num_drafts)
    assert set(current.accepted) == {num_drafts}


def test_rejection_repeats_with_the_same_seed_and_not_with_another() -> None:
    def output(seed: int) -> list[int]:
        target, _ = toy_target()
        draft, _ = toy_draft()
        return generate_overlapped(
            target, draft, session(replace(REJECTION, seed=seed)), NUM_OUTPUT, 3, FANOUTS["enumerated"]
        )

    assert output(1) == output(1)
    assert output(1) != output(2)


@pytest.mark.parametrize("fanout", ["ahead", "enumerated"])
def test_rejection_keeps_the_distribution_through_both_heads(fanout: str) -> None:
    """Sampled drafts, their distributions and branches drafted before the verdict, over many seeds."""
    sampling = replace(REJECTION, temperature=1.5, top_k=3, presence_penalty=1.0)
    expected = exact_probabilities(sampling, 3)
    room = {"max_num_seqs": 50, "num_blocks": 2000, "max_num_batched_tokens": 1000}
    target, _ = toy_target(**room)
    draft, _ = toy_draft(table(error=1.5), **room)
    seen: Counter[tuple[int, ...]] = Counter()
    accepted, hits = [], []
    for first in range(0, NUM_SAMPLES, 50):
        seeds = range(first, first + 50)
        sessions = [session(replace(sampling, seed=seed), request_id=str(seed)) for seed in seeds]
        seen.update(map(tuple, generate_together(target, draft, sessions, 3, 1, FANOUTS[fanout])))
        for current in sessions:
            accepted += current.accepted
            hits += current.hits
        target.release([str(seed) for seed in seeds])
        draft.release([str(seed) for seed in seeds])
    assert set(accepted) == {0, 1} and set(hits) == {False, True}
    assert set(seen) <= set(expected)
    outputs = list(expected)
    observed = [seen[output] for output in outputs]
    assert chi_square_p_value(observed, [NUM_SAMPLES * expected[output] for output in outputs]) > 1e-3
