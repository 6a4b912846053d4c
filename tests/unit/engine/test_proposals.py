"""The draft's proposals: their length and distributions, prompts in pieces, and items that it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.types import (
    ItemFailed,
    Outcomes,
    Proposal,
    SamplingParams,
    SpeculateItem,
    UnknownSequence,
    Verification,
)
from tests.unit.engine.harness import (
    CLOSE,
    TARGET,
    Session,
    model_logits,
    outcomes,
    propose,
    speculate_item,
    toy_draft,
)
from tests.unit.engine.samplings import (
    COUPLED,
    GREEDY,
    PROCESSED,
    PROMPT,
    REJECTION,
    expected_output,
    session,
)


def only(rows: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """The table with all other tokens impossible."""
    known = torch.zeros(rows.shape[1], dtype=torch.bool)
    known[list(token_ids)] = True
    return rows.masked_fill(~known, -math.inf)


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION])
def test_resent_item_gets_the_same_reply(sampling: SamplingParams) -> None:
    """What the draft itself put behind the told tokens is not taken for told."""
    draft, _ = toy_draft()
    item = SpeculateItem("a", 1, 0, tuple(PROMPT), 4, sampling=sampling)
    [proposal] = draft.speculate([item]).replies
    assert isinstance(proposal, Proposal)
    assert draft.speculate([item]).replies == (proposal,)
    ahead = SpeculateItem("a", 2, len(PROMPT), (), 4, proposal.draft.token_ids, (2, 0, 1, 0, 1))
    assert draft.speculate([ahead]).replies == draft.speculate([ahead]).replies
    assert draft.speculate([item]).replies == (proposal,)


def test_proposal_ends_at_max_model_len() -> None:
    draft, _ = toy_draft(max_model_len=12)
    for length, expected in ((9, 3), (11, 1), (12, 0)):
        drafted = propose(draft, Session("a", [1] * length, GREEDY), 5)
        assert len(drafted.token_ids) == expected
    [reply] = draft.speculate([SpeculateItem("a", 1, 0, (1,) * 13, 2, sampling=GREEDY)]).replies
    assert isinstance(reply, ItemFailed) and not reply.is_retriable and "1..12" in reply.message


def test_mixed_batch_of_lines_equals_each_alone() -> None:
    samplings = [GREEDY, COUPLED, REJECTION, PROCESSED]
    sessions = [session(sampling, request_id=name) for name, sampling in zip("abcd", samplings, strict=True)]
    alone = [toy_draft()[0].speculate([speculate_item(s, i)]).replies[0] for i, s in enumerate(sessions)]
    for current in sessions:
        current.draft_len = current.round_id = 0
    together = toy_draft()[0].speculate([speculate_item(s, i) for i, s in enumerate(sessions)]).replies
    assert list(together) == alone


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_prompt_read_in_pieces_beside_others_is_answered_as_one_that_came_whole(
    sampling: SamplingParams,
) -> None:
    prompt = (PROMPT * 3)[:10]
    other = SpeculateItem("b", 1, 0, tuple(PROMPT), 3, sampling=GREEDY)
    [whole] = (
        toy_draft()[0].speculate([SpeculateItem("a", 3, 0, tuple(prompt), 4, sampling=sampling)]).replies
    )
    [alone] = toy_draft()[0].speculate([other]).replies
    draft = toy_draft()[0]
    first = SpeculateItem("a", 1, 0, tuple(prompt[:4]), 0, sampling=sampling)
    assert draft.speculate([first, other]).replies == (Proposal("a", 1, 0, NO_DRAFT), alone)
    second = SpeculateItem("a", 2, 4, tuple(prompt[4:7]), 0)
    assert draft.speculate([second]).replies == (Proposal("a", 2, 4, NO_DRAFT),)
    [last] = draft.speculate([SpeculateItem("a", 3, 7, tuple(prompt[7:]), 4)]).replies
    assert isinstance(last, Proposal) and isinstance(whole, Proposal)
    assert last.draft.token_ids == whole.draft.token_ids


def test_draft_probs_are_the_truncated_distribution() -> None:
    draft, _ = toy_draft()
    drafted = propose(draft, session(replace(REJECTION, top_k=3)), 4)
    assert len(drafted.probs) == 4
    for token_id, probs in zip(drafted.token_ids, drafted.probs, strict=True):
        assert len(probs.token_ids) == 3 and token_id in probs.token_ids
        assert sum(probs.probs) == pytest.approx(1.0, abs=1e-6)
        assert list(probs.probs) == torch.tensor(probs.probs).tolist()
    assert propose(draft, session(replace(REJECTION, temperature=0.0), request_id="b"), 2).probs == ()


TRIMMED = (1, 3, 4, 8, 11, 12, 17, 21)


def check_equal(found: DraftTokens, wanted: DraftTokens) -> None:
    """Equal but for the last bit of a probability: sums over another number of tokens have another order."""
    for ours, theirs in zip(found.probs, wanted.probs, strict=True):
        probs = dict(zip(ours.token_ids, ours.probs, strict=True))
        assert probs == pytest.approx(dict(zip(theirs.token_ids, theirs.probs, strict=True)), rel=1e-6)
    assert replace(found, probs=()) == replace(wanted, probs=())


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION, PROCESSED])
@pytest.mark.parametrize("min_acceptance", [0.0, 0.2])
def test_trimmed_draft_proposes_what_the_whole_one_would_were_other_tokens_impossible(
    sampling: SamplingParams, min_acceptance: float
) -> None:
    """Its outcomes too, whether or not it knows the tokens that were told."""
    whole, _ = toy_draft(only(CLOSE, TRIMMED))
    trimmed, _ = toy_draft(token_ids=TRIMMED)
    item = SpeculateItem("a", 1, 0, tuple(PROMPT), 5, sampling=sampling, min_acceptance=min_acceptance)
    [proposal] = whole.speculate([item]).replies
    [found] = trimmed.speculate([item]).replies
    assert isinstance(found, Proposal) and isinstance(proposal, Proposal)
    check_equal(found.draft, proposal.draft)
    assert replace(found, draft=NO_DRAFT) == replace(proposal, draft=NO_DRAFT)
    assert set(proposal.draft.token_ids) <= set(TRIMMED)
    proposed = (*proposal.draft.token_ids[:2], 2)
    ahead = SpeculateItem("a", 2, len(PROMPT), (), 4, proposed, (2, 1, 2, 3))
    [likely] = whole.speculate([ahead]).replies
    [found] = trimmed.speculate([ahead]).replies
    assert isinstance(found, Outcomes) and isinstance(likely, Outcomes) and len(likely.branches) == 8
    for ours, theirs in zip(found.branches, likely.branches, strict=True):
        check_equal(ours.draft, theirs.draft)
        assert replace(ours, draft=NO_DRAFT) == replace(theirs, draft=NO_DRAFT)
    assert replace(found, branches=()) == replace(likely, branches=())


def test_trimmed_draft_ends_its_proposal_where_the_target_can_draw_none_of_its_tokens() -> None:
    sampling = replace(GREEDY, allowed_token_ids=(2, 3))
    knowing, _ = toy_draft(token_ids=TRIMMED)
    assert propose(knowing, session(sampling), 4).token_ids == (3, 3, 3, 3)
    sampling = replace(GREEDY, allowed_token_ids=(2, 5))
    draft, _ = toy_draft(token_ids=TRIMMED)
    current = session(sampling)
    assert propose(draft, current, 4) == NO_DRAFT
    found = outcomes(draft, current, DraftTokens((3,)), (2, 2), 3)
    assert found.branches == ()


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION, replace(PROCESSED, seed=5)])
def test_padding_of_a_vocabulary_is_never_proposed(sampling: SamplingParams) -> None:
    """However likely its logits are, and though told tokens and settings may be of it."""
    sampling = replace(sampling, logit_bias=((22, 50.0), (7, 2.0)), stop_token_ids=(2, 22))
    padded = CLOSE.clone()
    padded[:, 17:] += 30.0
    prompt = [*PROMPT, 20, 22, 20]
    whole, _ = toy_draft(only(CLOSE, range(17)))
    draft, _ = toy_draft(padded, num_token_ids=17)
    plain = replace(sampling, logit_bias=((7, 2.0),), stop_token_ids=(2,))
    expected = propose(whole, Session("a", list(prompt), plain), 6)
    assert propose(draft, Session("a", list(prompt), sampling), 6) == expected
    branches = outcomes(draft, Session("b", list(prompt), sampling), DraftTokens((3, 21)), (2, 2, 2), 3)
    likely = outcomes(whole, Session("b", list(prompt), plain), DraftTokens((3, 21)), (2, 2, 2), 3)
    assert branches == likely
    assert len(branches.branches) == 6


def test_lost_sequence_is_unknown_and_comes_back() -> None:
    draft, _ = toy_draft()
    current = session()
    first = propose(draft, current, 3)
    draft.release(["a"])
    item = speculate_item(current, 3)
    assert draft.speculate([item]).replies == (UnknownSequence("a", item.round_id, len(PROMPT)),)
    current.draft_len = 0
    assert propose(draft, current, 3) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (99,)}, "token_ids holds 99"),
        ({"proposed_token_ids": (99,), "fanout": (1,)}, "proposed_token_ids holds 99"),
        ({"fanout": (1, 1)}, "fanout is (1, 1) for 0 proposed tokens"),
        ({"fanout": (-1,)}, "fanout is (-1,)"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"min_acceptance": 1.0}, "min_acceptance is 1.0; allowed: 0 or more, below 1"),
        ({"min_acceptance": -0.1}, "min_acceptance is -0.1"),
        ({"sampling": None}, "sampling is missing"),
        ({"token_ids": ()}, "0 tokens"),
    ],
)
def test_bad_speculate_item_fails_alone(changes: dict[str, object], message: str) -> None:
    draft, _ = toy_draft(TARGET)
    good = SpeculateItem("b", 1, 0, tuple(PROMPT), 1, sampling=GREEDY)
    bad = replace(good, request_id="a", **changes)  # type: ignore[arg-type]
    failed, served = draft.speculate([bad, good]).replies
    assert isinstance(failed, ItemFailed) and not failed.is_retriable
    assert message in failed.message
    assert isinstance(served, Proposal) and served.draft.token_ids == tuple(expected_output(GREEDY)[:1])


def bounded_proposal(sampling: SamplingParams, min_acceptance: float) -> Proposal:
    draft, _ = toy_draft()
    item = SpeculateItem("a", 1, 0, tuple(PROMPT), 6, sampling=sampling, min_acceptance=min_acceptance)
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, Proposal)
    return reply


@pytest.mark.parametrize("min_acceptance", [0.01, 0.3, 0.6, 0.9, 0.99])
def test_proposal_ends_before_the_token_that_the_draft_doubts(min_acceptance: float) -> None:
    whole = bounded_proposal(GREEDY, 0.0).draft.token_ids
    assert len(whole) == 6
    # A token's chance is its share of the scores' softmax at half their scale; the first one always comes.
    chance, num_expected = 1.0, 0
    for index, token_id in enumerate(whole):
        scores = 2.0 * model_logits(CLOSE, [*PROMPT, *whole[:index]])
        chance *= float(scores.softmax(-1)[token_id])
        if index and chance < min_acceptance:
            break
        num_expected += 1
    assert bounded_proposal(GREEDY, min_acceptance).draft.token_ids == whole[:num_expected]


def test_coupled_proposal_is_bounded_by_scores_with_the_noise() -> None:
    coupled = SamplingParams(temperature=1.0, seed=3, num_prompt_tokens=len(PROMPT))
    lengths = [len(bounded_proposal(coupled, bound).draft.token_ids) for bound in (0.0, 0.2, 0.95)]
    assert lengths[0] == 6 and lengths == sorted(lengths, reverse=True) and lengths[-1] < 6


def test_bound_does_not_select_draft_tokens_under_rejection() -> None:
    rejection = SamplingParams(
        temperature=1.0, seed=3, num_prompt_tokens=len(PROMPT), verification=Verification.REJECTION
    )
    assert bounded_proposal(rejection, 0.99) == bounded_proposal(rejection, 0.0)


def test_a_bounded_line_does_not_shorten_the_others_of_its_batch() -> None:
    draft, _ = toy_draft()
    one = SpeculateItem("a", 1, 0, tuple(PROMPT), 6, sampling=GREEDY, min_acceptance=0.99)
    other = replace(one, request_id="b", min_acceptance=0.0)
    short, long = draft.speculate([one, other]).replies
    assert isinstance(short, Proposal) and isinstance(long, Proposal)
    assert short.draft.token_ids == bounded_proposal(GREEDY, 0.99).draft.token_ids
    assert long.draft.token_ids == bounded_proposal(GREEDY, 0.0).draft.token_ids


def test_draft_check_runs_a_step() -> None:
    draft, runner = toy_draft()
    draft.check()
    assert [len(step) for step in runner.steps] == [1]
