"""The draft's outcomes: which branches it drafts before the verdict, and what each costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.types import Outcomes, Proposal, SamplingParams, SpeculateItem
from tests.unit.engine.harness import (
    CLOSE,
    NUM_ROWS,
    TARGET,
    VOCAB_SIZE,
    Session,
    generate_overlapped,
    model_logits,
    outcomes,
    propose,
    speculate_item,
    table,
    toy_draft,
    toy_target,
    verify,
)
from tests.unit.engine.samplings import (
    COUPLED,
    FANOUTS,
    GREEDY,
    NUM_OUTPUT,
    PROCESSED,
    PROMPT,
    REJECTION,
    expected_output,
    session,
)


def test_chain_hit_costs_one_forward_per_token_and_no_recomputation() -> None:
    draft, runner = toy_draft(TARGET)
    target, _ = toy_target()
    current = session(COUPLED)
    drafted = propose(draft, current, 3)
    assert runner.num_rows == len(PROMPT) + 2
    for _ in range(4):
        before = len(runner.steps), runner.num_rows
        [branch] = outcomes(draft, current, drafted, (0, 0, 0, 1), 3).branches
        # The last proposed token, the bonus guess and all but the last token of the continuation.
        assert (len(runner.steps) - before[0], runner.num_rows - before[1]) == (4, 4)
        verdict = verify(target, current, drafted)
        assert (branch.num_accepted_tokens, branch.next_token_id) == (3, verdict.next_token_id)
        drafted = branch.draft


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED, REJECTION])
def test_branches_are_what_a_fresh_proposal_would_be(sampling: SamplingParams) -> None:
    draft, _ = toy_draft()
    current = session(sampling)
    drafted = propose(draft, current, 3)
    for round_index in range(4):
        reply = outcomes(draft, current, drafted, (3, 0, 2, 4), 3)
        numbers = [branch.num_accepted_tokens for branch in reply.branches]
        assert numbers == [0, 0, 0, 2, 2, 3, 3, 3, 3]
        for branch in reply.branches:
            prefix = [*drafted.token_ids[: branch.num_accepted_tokens], branch.next_token_id]
            fresh = Session("a", current.token_ids + prefix, sampling)
            fresh_draft, _ = toy_draft()
            assert branch.draft == propose(fresh_draft, fresh, 3)
            assert bool(branch.draft.probs) == (sampling is REJECTION)
            if branch.num_accepted_tokens < 3:
                assert branch.next_token_id != drafted.token_ids[branch.num_accepted_tokens]
        taken = reply.branches[round_index * 2]
        current.token_ids += [*drafted.token_ids[: taken.num_accepted_tokens], taken.next_token_id]
        drafted = taken.draft
        draft.check_integrity()


def test_branches_compute_nothing_of_what_they_share() -> None:
    draft, runner = toy_draft()
    current = Session("a", PROMPT * 8, GREEDY)
    drafted = propose(draft, current, 2)
    before = runner.num_rows
    branches = outcomes(draft, current, drafted, (1, 1, 1), 2).branches
    # Three rows for the rankings; then two steps of three chains each.
    assert runner.num_rows - before == 3 + 2 * 3
    for branch in branches:
        prefix = [*drafted.token_ids[: branch.num_accepted_tokens], branch.next_token_id]
        fresh = Session("a", current.token_ids + prefix, GREEDY)
        assert branch.draft.token_ids == propose(toy_draft()[0], fresh, 2).token_ids
    draft.check_integrity()


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED, REJECTION])
def test_full_fanout_never_misses(sampling: SamplingParams) -> None:
    draft, _ = toy_draft(table(error=2.0), max_num_batched_tokens=16)
    target, _ = toy_target()
    current = session(sampling)
    generate_overlapped(target, draft, current, 12, 2, lambda count: (VOCAB_SIZE,) * (count + 1))
    assert current.hits and all(current.hits)
    assert len(set(current.accepted)) > 1


def test_coupled_ranking_knows_the_noise() -> None:
    """A perfect draft's first guess of the bonus token is the target's own draw."""
    draft, _ = toy_draft(TARGET)
    target, _ = toy_target()
    current = session(PROCESSED)
    generate_overlapped(target, draft, current, NUM_OUTPUT, 3, FANOUTS["ahead"])
    assert all(current.hits)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION])
def test_branches_go_where_the_draft_is_least_sure(sampling: SamplingParams) -> None:
    """Of all outcomes the likeliest, by the distances between the draft's own scores."""
    rows = torch.full((NUM_ROWS, VOCAB_SIZE), -30.0)
    prefix = list(PROMPT)
    scale = 1.0 if sampling is GREEDY else 100.0  # more than any noise
    # Sure of the first token; unsure of the second, for which 4 is the other guess; 5, then 6 as the bonus.
    for best, second, distance in ((1, 2, 0.9), (3, 4, 0.1), (5, 6, 0.6)):
        row = model_logits(rows, prefix)
        row[best], row[second] = scale, scale * (1 - distance)
        prefix.append(best)
    draft, _ = toy_draft(rows)
    current = session(sampling)
    [reply] = draft.speculate([speculate_item(current, 0, proposed=(1, 3), fanout=(2, 2, 2))]).replies
    assert isinstance(reply, Outcomes)
    everything = [(branch.num_accepted_tokens, branch.next_token_id) for branch in reply.branches]
    assert {(0, 2), (1, 4), (2, 5), (2, 6)} < set(everything)
    item = replace(speculate_item(current, 0, proposed=(1, 3), fanout=(2, 2, 2)), max_branches=2)
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, Outcomes)
    chosen = [(branch.num_accepted_tokens, branch.next_token_id) for branch in reply.branches]
    # Under rejection nothing tells at which token it comes: the first is the likeliest.
    assert chosen == ([(0, 2), (2, 5)] if sampling is REJECTION else [(1, 4), (2, 5)])
    draft.check_integrity()


def test_under_rejection_the_noise_of_a_place_leaves_the_branches_of_others_alone() -> None:
    """Else whether a round has draft tokens would tell of the draws of its own tokens."""
    draft, _ = toy_draft(TARGET)
    numbers, tokens = set(), set()
    for seed in range(40):
        current = session(replace(REJECTION, seed=seed))
        item = speculate_item(current, 0, proposed=(1, 3), fanout=(4, 4, 4))
        [reply] = draft.speculate([replace(item, max_branches=5)]).replies
        assert isinstance(reply, Outcomes)
        numbers.add(tuple(branch.num_accepted_tokens for branch in reply.branches))
        tokens.add(tuple(branch.next_token_id for branch in reply.branches))
        draft.release([item.request_id])
    assert numbers == {(0, 0, 1, 2, 2)}
    assert len(tokens) > 20


def test_narrow_nucleus_of_the_draft_still_ranks_alternatives() -> None:
    """With top_k 1 the draft's only token is the rejected one, but the target's may be another."""
    draft, _ = toy_draft()
    current = session(replace(COUPLED, top_k=1, temperature=0.01))
    drafted = propose(draft, current, 1)
    order = model_logits(CLOSE, PROMPT).sort(descending=True).indices.tolist()
    bonus = model_logits(CLOSE, [*PROMPT, order[0]]).argmax().item()
    branches = outcomes(draft, current, drafted, (2, 1), 1).branches
    assert drafted.token_ids == (order[0],)
    assert [branch.next_token_id for branch in branches] == [order[1], order[2], bonus]


def test_branches_without_room_are_left_out_the_least_likely_first() -> None:
    draft, _ = toy_draft(num_blocks=6)
    current = session()
    drafted = propose(draft, current, 2)
    reply = outcomes(draft, current, drafted, (3, 3, 3), 2)
    # Of 20 slots, 11 hold the sequence with its proposal, and each branch computes two tokens.
    roomy, _ = toy_draft()
    item = replace(speculate_item(session(), 2, proposed=drafted.token_ids, fanout=(3, 3, 3)), max_branches=4)
    [expected] = roomy.speculate([item]).replies
    assert isinstance(expected, Outcomes) and len(expected.branches) == 4
    assert reply.branches == expected.branches
    draft.check_integrity()


def test_branches_end_at_max_model_len() -> None:
    draft, _ = toy_draft(max_model_len=12)
    current = session()
    reply = outcomes(draft, current, DraftTokens((1, 2, 3)), (1, 1, 1, 1), 5)
    found = [(branch.num_accepted_tokens, len(branch.draft.token_ids)) for branch in reply.branches]
    assert found == [(0, 2), (1, 1), (2, 0)]
    full = Session("b", [1] * 12, GREEDY)
    assert outcomes(draft, full, NO_DRAFT, (1,), 5).branches == ()


def test_outcomes_before_any_proposal() -> None:
    """The draft joins a session whose target already works without it."""
    draft, _ = toy_draft(TARGET)
    reply = outcomes(draft, session(), NO_DRAFT, (1,), 3)
    [branch] = reply.branches
    assert [branch.next_token_id, *branch.draft.token_ids] == expected_output(GREEDY)[:4]


def test_proposal_and_outcomes_of_one_request_in_one_batch() -> None:
    draft, _ = toy_draft(TARGET)
    current = session()
    output = tuple(expected_output(GREEDY))
    items = [
        speculate_item(current, 2),
        speculate_item(current, 2, proposed=output[:2], fanout=(0, 0, 1)),
        SpeculateItem("b", 1, 0, tuple(PROMPT), 3, sampling=GREEDY),
    ]
    first, second, third = draft.speculate(items).replies
    assert isinstance(first, Proposal) and first.draft.token_ids == output[:2]
    assert isinstance(second, Outcomes)
    assert [(b.next_token_id, b.draft.token_ids) for b in second.branches] == [(output[2], output[3:5])]
    assert isinstance(third, Proposal) and third.draft.token_ids == output[:3]
