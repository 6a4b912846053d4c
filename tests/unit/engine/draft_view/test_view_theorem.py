"""Drafts that read other tokens than the target writes: what they propose, and that it is of use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.draft_tokens import DraftTokens
from specray.engine.draft_view.engine import NO_LIMIT
from specray.types import Outcomes, Proposal, SamplingParams, SpeculateItem, UnknownSequence
from tests.unit.engine.draft_view.toys import ALONE, toy_viewer
from tests.unit.engine.harness import (
    TARGET,
    Session,
    generate_overlapped,
    generate_serial,
    outcomes,
    propose,
    toy_draft,
    toy_target,
    verify,
)
from tests.unit.engine.samplings import (
    COUPLED,
    FANOUTS,
    GREEDY,
    NUM_OUTPUT,
    PROMPT,
    REJECTION,
    SAMPLINGS,
    assert_all_free,
    expected_output,
    session,
)
from tests.unit.engine.trees.drafters import engine_drafter


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS["greedy-processed"], COUPLED])
def test_a_draft_that_knows_the_target_is_accepted_up_to_the_first_token_that_it_lacks(
    sampling: SamplingParams,
) -> None:
    """So noise, penalties and bias are by the target's ids, and the draft's context is what it should be."""
    target, _ = toy_target()
    draft, _ = toy_viewer("intersect", TARGET)
    current = session(sampling)
    expected = expected_output(sampling, NUM_OUTPUT + 9)
    generate_serial(target, engine_drafter(draft), current, NUM_OUTPUT, 4)
    place, num_accepted = 0, []
    while len(num_accepted) < len(current.accepted):
        run = next((n for n in range(4) if expected[place + n] in ALONE), 4)
        num_accepted.append(run)
        place += run + 1
    assert current.accepted == num_accepted
    assert 4 in num_accepted and min(num_accepted) < 4


@pytest.mark.parametrize("overlap", ["enumerated", "ahead"])
def test_outcomes_of_a_draft_that_knows_the_target_hit(overlap: str) -> None:
    target, _ = toy_target()
    draft, _ = toy_viewer("intersect", TARGET)
    current = session(COUPLED)
    expected = expected_output(COUPLED)
    assert generate_overlapped(target, draft, current, NUM_OUTPUT, 3, FANOUTS[overlap]) == expected
    assert any(current.hits)
    if overlap == "enumerated":
        plain, _ = toy_draft(TARGET)
        other = session(COUPLED, request_id="b")
        generate_overlapped(target, plain, other, NUM_OUTPUT, 3, FANOUTS[overlap])
        assert sum(current.hits) >= sum(other.hits) - 5


def test_text_of_a_draft_that_knows_the_target_is_all_accepted_at_temperature_0() -> None:
    """Also of tokens that the draft has in two pieces."""
    target, _ = toy_target()
    draft, _ = toy_viewer("retokenize", TARGET)
    current, proposed = session(GREEDY), 0
    while len(current.token_ids) < len(PROMPT) + NUM_OUTPUT:
        drafted = propose(draft, current, 4)
        assert drafted.is_chain and not drafted.probs
        proposed += len(drafted)
        verify(target, current, drafted)
    assert sum(current.accepted) == proposed
    assert any(token_id in ALONE for token_id in current.token_ids[len(PROMPT) :])
    assert max(current.accepted) == 4


def test_sampled_tokens_come_with_their_chances_over_shared_tokens_alone() -> None:
    draft, _ = toy_viewer("intersect", TARGET)
    drafted = propose(draft, session(REJECTION), 4)
    assert len(drafted.probs) == len(drafted) == 4
    for token_id, row in zip(drafted.token_ids, drafted.probs, strict=True):
        assert token_id in row.token_ids and not set(row.token_ids) & set(ALONE)
        assert sum(row.probs) == pytest.approx(1.0)


def test_text_is_certain_under_rejection() -> None:
    """A router drops sampled tokens without their chances."""
    draft, _ = toy_viewer("retokenize", TARGET)
    drafted = propose(draft, session(REJECTION), 4)
    assert [(row.token_ids, row.probs) for row in drafted.probs] == [
        ((token_id,), (1.0,)) for token_id in drafted.token_ids
    ]
    assert drafted


def test_outcomes_end_before_a_proposed_token_that_is_none_of_the_drafts() -> None:
    draft, _ = toy_viewer("intersect", TARGET)
    current = session(GREEDY)
    reply = outcomes(draft, current, DraftTokens((3, ALONE[1], 4)), (1, 2, 2, 2), 2)
    assert {branch.num_accepted_tokens for branch in reply.branches} == {0, 1}
    draft.check_integrity()


def test_a_window_takes_any_length_in_bounded_memory() -> None:
    draft, runner = toy_viewer("same", window=16, max_model_len=64, num_blocks=40)
    assert draft.info.max_model_len == NO_LIMIT
    current = Session("a", [token_id % 23 for token_id in range(700)], replace(GREEDY, num_prompt_tokens=700))
    for _ in range(60):
        assert len(propose(draft, current, 3)) == 3
        assert draft.info.num_blocks_in_use * draft.info.block_size < 4 + 16 + 8 + 3 + 8
        current.token_ids += [len(current.token_ids) % 23] * 2
        draft.check_integrity()
    # A step's two tokens, its own two, and half a window again for each eight tokens that it moves on by.
    assert runner.num_rows < 28 + 60 * (2 + 2 + 2 * 28 / 8)


def test_a_long_prompt_is_read_when_it_is_all_there() -> None:
    draft, runner = toy_viewer("same", window=16, max_model_len=64)
    prompt = [token_id % 23 for token_id in range(90)]
    for start in range(0, 90, 30):
        chunk = tuple(prompt[start : start + 30])
        item = SpeculateItem("a", 0, start, chunk, 0, sampling=None if start else GREEDY)
        [reply] = draft.speculate([item]).replies
        assert reply == Proposal("a", 0, start)
    assert runner.num_rows == 0
    [reply] = draft.speculate([SpeculateItem("a", 1, 90, (5,), 2)]).replies
    assert isinstance(reply, Proposal) and len(reply.draft) == 2
    assert runner.num_rows <= 4 + 16 + 8 + 2


def test_requests_with_equal_prompts_share_a_windows_prefix() -> None:
    draft, runner = toy_viewer("same", window=32, max_model_len=96, block_size=4, num_blocks=100)
    prompt = tuple(token_id % 23 for token_id in range(90))
    replies = []
    for name in "ab":
        replies += draft.speculate([SpeculateItem(name, 0, 0, prompt, 1, sampling=GREEDY)]).replies
        draft.release([name])
    # The last 42 tokens behind the first four; of the second request, all but what no whole unit holds.
    assert draft.info.num_prefix_cache_hits == 44
    assert runner.num_rows == 46 + 2
    assert getattr(replies[0], "draft", None) == getattr(replies[1], "draft", 0)
    draft.check_integrity()
    assert_all_free(draft)


def test_what_is_not_known_is_asked_again_and_what_does_not_fit_is_left() -> None:
    draft, runner = toy_viewer("intersect", max_model_len=20)
    [unknown] = draft.speculate([SpeculateItem("a", 3, 5, (1,), 2)]).replies
    assert unknown == UnknownSequence("a", 3, 5)
    # Fifteen tokens, each two of the draft's.
    [reply] = draft.speculate([SpeculateItem("a", 4, 0, (7,) * 15, 2, sampling=GREEDY)]).replies
    assert reply == Proposal("a", 4, 0)
    [reply] = draft.speculate([SpeculateItem("a", 5, 15, (), 2, fanout=(1,))]).replies
    assert reply == Outcomes("a", 5, 15, ())
    assert not runner.steps
    [failed] = draft.speculate([SpeculateItem("b", 6, 0, (23,), 2, sampling=GREEDY)]).replies
    assert getattr(failed, "message", "") == "token_ids holds 23; allowed: 0..22"


def test_an_evicted_sequence_is_told_again() -> None:
    draft, _ = toy_viewer("intersect", max_num_seqs=1)
    draft.speculate([SpeculateItem("a", 0, 0, tuple(PROMPT), 2, sampling=GREEDY)])
    # Idle for long enough.
    draft.table._step += 1000
    draft.speculate([SpeculateItem("b", 0, 0, tuple(PROMPT), 2, sampling=GREEDY)])
    [reply] = draft.speculate([SpeculateItem("a", 1, len(PROMPT), (3,), 2)]).replies
    assert reply == UnknownSequence("a", 1, len(PROMPT))
    draft.release(["b"])
    again = (*PROMPT, 3)
    [reply] = draft.speculate([SpeculateItem("a", 2, 0, again, 2, sampling=GREEDY)]).replies
    assert isinstance(reply, Proposal) and len(reply.draft) == 2
