"""What a draft computes behind a chain in one forward: masks of PARD, and the tokens of its own draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.draft_tokens import DraftTokens, TreeBudget
from specray.engine.drafting.guesses import ModelGuesses, NgramGuesses
from specray.engine.sampling.draft import DraftSampler
from specray.engine.sampling.noise import NoiseSource
from specray.types import Proposal, SamplingParams, SpeculateItem
from tests.unit.engine.guesses.guessers import CASCADES, MASK, masks
from tests.unit.engine.harness import (
    CLOSE,
    VOCAB_SIZE,
    Session,
    model_logits,
    outcomes,
    propose,
    speculate_item,
    toy_draft,
    toy_target,
    verify,
)
from tests.unit.engine.sampling.rows import row_group
from tests.unit.engine.samplings import (
    COUPLED,
    GREEDY,
    PROCESSED,
    PROMPT,
    REJECTION,
    assert_all_free,
    session,
)

SAMPLINGS = [GREEDY, COUPLED, PROCESSED, REJECTION]


def behind_masks(prefix: Sequence[int], sampling: SamplingParams, num_tokens: int) -> DraftTokens:
    """What PARD proposes, without engine and cache: token j is drawn behind j masks."""
    sampler = DraftSampler(NoiseSource(VOCAB_SIZE))
    tokens = list(prefix)
    probs = []
    for index in range(num_tokens):
        row = model_logits(CLOSE, [*prefix, *[MASK] * index])[None]
        [drawn] = sampler.draw(row, [row_group(sampling, tokens, 1)])
        assert drawn is not None
        tokens.append(drawn.token_id)
        probs += [] if drawn.probs is None else [drawn.probs]
    return DraftTokens(tuple(tokens[len(prefix) :]), probs=tuple(probs))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_masks_give_all_draft_tokens_in_one_forward(sampling: SamplingParams) -> None:
    draft, runner = toy_draft(guesser=masks())
    target, _ = toy_target()
    current = session(sampling)
    for num_drafts in (4, 1, 6, 2, 5):
        before = len(runner.steps)
        drafted = propose(draft, current, num_drafts)
        assert drafted == behind_masks(current.token_ids, sampling, num_drafts)
        assert len(runner.steps) == before + 1
        # All of the prompt, or what the last verdict brought, and a mask for each token but the first.
        assert runner.steps[-1][0].token_ids[1 - num_drafts :] == [MASK] * (num_drafts - 1) or num_drafts == 1
        verify(target, current, drafted)
        draft.check_integrity()
    assert_all_free(draft)


def test_a_mask_is_never_taken_for_a_computed_token() -> None:
    """Neither told masks nor draft tokens that are the mask's: the toy cache checks what it reads."""
    draft, runner = toy_draft(guesser=masks())
    current = session(GREEDY)
    drafted = propose(draft, current, 4)
    for told in ([MASK, MASK, MASK], list(drafted.token_ids)):
        current.token_ids += told
        before = runner.num_rows
        assert propose(draft, current, 4) == behind_masks(current.token_ids, GREEDY, 4)
        assert runner.num_rows - before == len(told) + 3
        drafted = propose(draft, current, 4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_outcomes_behind_masks_are_fresh_proposals_in_one_forward_more(sampling: SamplingParams) -> None:
    draft, runner = toy_draft(guesser=masks())
    current = session(sampling)
    drafted = propose(draft, current, 3)
    for round_index in range(4):
        before = len(runner.steps)
        reply = outcomes(draft, current, drafted, (3, 0, 2, 4), 3)
        assert len(runner.steps) == before + 2
        assert [branch.num_accepted_tokens for branch in reply.branches] == [0, 0, 0, 2, 2, 3, 3, 3, 3]
        for branch in reply.branches:
            prefix = [*drafted.token_ids[: branch.num_accepted_tokens], branch.next_token_id]
            assert branch.draft == behind_masks(current.token_ids + prefix, sampling, 3)
        taken = reply.branches[round_index * 2]
        current.token_ids += [*drafted.token_ids[: taken.num_accepted_tokens], taken.next_token_id]
        drafted = taken.draft
        draft.check_integrity()
    assert_all_free(draft)


def test_masks_of_an_own_branch_are_not_taken_for_what_it_drew() -> None:
    draft, runner = toy_draft(guesser=masks())
    current = session(GREEDY)
    drafted = propose(draft, current, 3)
    [branch] = outcomes(draft, current, drafted, (0, 0, 0, 1), 3).branches
    current.token_ids += [*drafted.token_ids, branch.next_token_id, *branch.draft.token_ids[:2], 3]
    before = runner.num_rows
    assert propose(draft, current, 3) == behind_masks(current.token_ids, GREEDY, 3)
    # Of the branch the next token alone was known.
    assert runner.num_rows - before == 3 + 2


def test_a_draft_with_masks_answers_a_chain_where_a_tree_is_asked_for() -> None:
    draft, _ = toy_draft(guesser=masks())
    item = replace(speculate_item(session(GREEDY), 4), tree=TreeBudget(8))
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, Proposal) and reply.draft == behind_masks(PROMPT, GREEDY, 4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_proposes_what_the_draft_alone_does(name: str, sampling: SamplingParams) -> None:
    """Its tokens, distributions and ends, for requests side by side."""
    alone, _ = toy_draft()
    cascade, _ = toy_draft(guesser=CASCADES[name]())
    target, _ = toy_target()
    pairs = [[session(sampling, request_id=letter) for letter in "ab"] for _ in range(2)]
    pairs[0][1].token_ids *= 2
    pairs[1][1].token_ids *= 2
    for round_index in range(10):
        num_drafts, bound = round_index % 7, 0.1 * (round_index % 3)
        items = [
            [replace(speculate_item(current, num_drafts), min_acceptance=bound) for current in pair]
            for pair in pairs
        ]
        expected, found = alone.speculate(items[0]).replies, cascade.speculate(items[1]).replies
        assert found == expected
        for pair in pairs:
            for current, reply in zip(pair, expected, strict=True):
                assert isinstance(reply, Proposal)
                verify(target, current, reply.draft)
                target.release([current.request_id])
                current.target_len = 0
        cascade.check_integrity()
    assert_all_free(cascade)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_answers_the_outcomes_of_the_draft_alone(name: str, sampling: SamplingParams) -> None:
    alone, _ = toy_draft()
    cascade, _ = toy_draft(guesser=CASCADES[name]())
    current, other = session(sampling), session(sampling)
    drafted = propose(alone, current, 3)
    assert propose(cascade, other, 3) == drafted
    for round_index in range(4):
        reply = outcomes(alone, current, drafted, (3, 0, 2, 4), 5)
        assert outcomes(cascade, other, drafted, (3, 0, 2, 4), 5) == reply
        taken = reply.branches[round_index * 2]
        for known in (current, other):
            known.token_ids += [*drafted.token_ids[: taken.num_accepted_tokens], taken.next_token_id]
        drafted = taken.draft
        cascade.check_integrity()
    assert_all_free(cascade)


def test_a_right_inner_draft_saves_the_drafts_forwards() -> None:
    inner, inner_runner = toy_draft(CLOSE)
    draft, runner = toy_draft(guesser=ModelGuesses(inner, 3))
    current = session(COUPLED)
    drafted = propose(draft, current, 8)
    # Three guesses and the own token twice; the last pass has none left to guess.
    assert len(runner.steps) == 2 and len(drafted) == 8
    assert len(inner_runner.steps) == 6
    assert runner.num_rows == len(PROMPT) + 3 + 4
    current.token_ids += drafted.token_ids
    before = runner.num_rows
    propose(draft, current, 1)
    # The last draft token was the only one that had not been computed.
    assert runner.num_rows == before + 1


def test_ngrams_of_a_periodic_text_save_forwards_and_wrong_ones_cost_none() -> None:
    periodic = CLOSE.clone()
    periodic[:, :] = -10.0
    draft, runner = toy_draft(periodic, guesser=NgramGuesses(8))
    biased = replace(GREEDY, logit_bias=((7, 50.0),))
    current = Session("a", [7] * 9, biased)
    assert propose(draft, current, 6).token_ids == (7,) * 6
    assert len(runner.steps) == 1
    other = Session("b", [3, 4, 3, 4, 3, 4, 3, 4, 3], replace(biased, num_prompt_tokens=9))
    before = len(runner.steps)
    assert propose(draft, other, 4).token_ids == (7,) * 4
    # A wrong guess, then none: the text has no 3 7.
    assert len(runner.steps) - before == 4


def test_an_inner_draft_that_lost_a_request_is_told_it_again() -> None:
    def num_forwards(*, is_lost: bool) -> int:
        """Forwards of the draft for its second proposal: the fewer, the more is guessed."""
        inner, _ = toy_draft(CLOSE)
        draft, runner = toy_draft(guesser=ModelGuesses(inner, 3))
        current = session(COUPLED)
        first = propose(draft, current, 6)
        if is_lost:
            inner.release(["a"])
        current.token_ids += first.token_ids
        before = len(runner.steps)
        assert propose(draft, current, 6) == propose(toy_draft()[0], session_of(current), 6)
        return len(runner.steps) - before

    assert num_forwards(is_lost=True) == num_forwards(is_lost=False) < 6


def session_of(current: Session) -> Session:
    """The same tokens for an engine that knows none of them."""
    return Session("z", list(current.token_ids), current.sampling)


def test_items_of_one_prompt_in_pieces_are_guessed_for_at_its_end() -> None:
    draft, _ = toy_draft(guesser=NgramGuesses(4))
    first = SpeculateItem("a", 1, 0, tuple(PROMPT[:4]), 0, sampling=COUPLED)
    draft.speculate([first])
    [last] = draft.speculate([SpeculateItem("a", 2, 4, tuple(PROMPT[4:]), 4)]).replies
    assert isinstance(last, Proposal)
    assert last.draft == propose(toy_draft()[0], session(COUPLED), 4)
