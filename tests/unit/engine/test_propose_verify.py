"""The two heads over a model that can be computed by hand: the theorem, outcomes, and bad items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specray.engine.draft import DraftEngine
from specray.engine.sampling.logprobs import token_logprobs
from specray.engine.sampling.processors import process_logits
from specray.engine.step import ForwardOutput
from specray.engine.target import TargetEngine
from specray.errors import EngineLostError
from specray.types import (
    NO_DRAFT,
    DraftTokens,
    ItemFailed,
    Outcomes,
    Proposal,
    SamplingParams,
    SparseProbs,
    SpeculateItem,
    UnknownSequence,
    Verdict,
    Verification,
    VerifyItem,
)
from tests.unit.engine.harness import (
    CLOSE,
    NUM_ROWS,
    TARGET,
    VOCAB_SIZE,
    Drafter,
    Session,
    SlotRunner,
    adversarial_drafter,
    commit,
    dying_drafter,
    empty_drafter,
    engine_drafter,
    generate_overlapped,
    generate_serial,
    model_logits,
    outcomes,
    propose,
    random_drafter,
    speculate_item,
    table,
    target_only,
    toy_draft,
    toy_target,
    tree_drafter,
    verify,
    verify_item,
)
from tests.unit.engine.p_values import chi_square_p_value
from tests.unit.engine.sampling.rows import row_group

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NUM_OUTPUT = 24
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
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy-processed": replace(PROCESSED, temperature=0.0),
    "coupled": COUPLED,
    "coupled-processed": PROCESSED,
}
DRAFTERS = ["perfect", "close", "random", "tree", "adversarial", "empty", "dying"]


def session(sampling: SamplingParams = GREEDY, *, request_id: str = "a") -> Session:
    return Session(request_id, list(PROMPT), sampling)


def expected_output(sampling: SamplingParams, num_output: int = NUM_OUTPUT) -> list[int]:
    return target_only(lambda prefix: model_logits(TARGET, prefix), PROMPT, sampling, num_output)


def make_drafter(name: str, sampling: SamplingParams) -> tuple[Drafter, DraftEngine | None]:
    match name:
        case "perfect" | "close":
            draft, _ = toy_draft(TARGET if name == "perfect" else CLOSE)
            return engine_drafter(draft), draft
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


def assert_all_free(head: TargetEngine | DraftEngine) -> None:
    head.release(["a", "b", "c", "d"])
    head.check_integrity()
    assert head.num_free_blocks == head.info.num_blocks - 1


# ---- the theorem


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_the_targets_alone_with_any_draft(name: str, sampling: SamplingParams) -> None:
    expected = expected_output(sampling)
    target, _ = toy_target()
    for num_drafts in range(9):
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


FANOUTS = {
    "ahead": lambda num_drafts: (0,) * num_drafts + (1,),
    "enumerated": lambda num_drafts: (2,) * num_drafts + (3,),
    "first-only": lambda num_drafts: (4,),
    "holes": lambda num_drafts: tuple(2 * (n % 2) for n in range(num_drafts + 1)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("fanout", FANOUTS)
def test_output_is_the_targets_alone_with_overlap(fanout: str, sampling: SamplingParams) -> None:
    expected = expected_output(sampling)
    target, _ = toy_target()
    for num_drafts in range(9):
        draft, _ = toy_draft()
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


@pytest.mark.parametrize("fanout", ["ahead", "enumerated"])
def test_rejection_keeps_the_distribution_through_both_heads(fanout: str) -> None:
    """Sampled drafts, their distributions and branches drafted before the verdict, over many seeds."""
    sampling = replace(REJECTION, temperature=1.5, top_k=3, presence_penalty=1.0)
    expected = exact_probabilities(sampling, 3)
    target, _ = toy_target()
    draft, _ = toy_draft(table(error=1.5))
    seen: Counter[tuple[int, ...]] = Counter()
    accepted, hits = [], []
    for seed in range(1500):
        current = session(replace(sampling, seed=seed))
        output = generate_overlapped(target, draft, current, 3, 1, FANOUTS[fanout])
        seen[tuple(output)] += 1
        accepted += current.accepted
        hits += current.hits
        target.release(["a"])
        draft.release(["a"])
    assert set(accepted) == {0, 1} and set(hits) == {False, True}
    assert set(seen) <= set(expected)
    outputs = list(expected)
    observed = [seen[output] for output in outputs]
    assert chi_square_p_value(observed, [1500 * expected[output] for output in outputs]) > 1e-3


def test_accepted_draft_tokens_are_told_again_and_are_no_rows_of_the_next_step() -> None:
    output, target = expected_output(GREEDY), toy_target()[0]
    items = [
        VerifyItem("a", 1, 0, tuple(PROMPT), sampling=GREEDY),
        VerifyItem("a", 2, len(PROMPT), (output[0],), DraftTokens(tuple(output[1:4]))),
        VerifyItem("a", 3, len(PROMPT) + 1, tuple(output[1:5]), DraftTokens((output[5], VOCAB_SIZE - 1))),
    ]
    assert [target.verify([item]).num_rows for item in items] == [len(PROMPT), 4, 3]


# ---- the target


def test_prefill_in_chunks_equals_one_prompt() -> None:
    target, runner = toy_target()
    chunks = [(0, PROMPT[:4]), (4, PROMPT[4:5]), (5, PROMPT[5:])]
    for index, (base_len, tokens) in enumerate(chunks):
        item = VerifyItem(
            "a", index, base_len, tuple(tokens), sample=False, sampling=None if base_len else GREEDY
        )
        [reply] = target.verify([item]).replies
        assert reply == Verdict("a", index, base_len, 0, None)
    current = session()
    current.target_len = len(PROMPT)
    assert verify(target, current, NO_DRAFT).next_token_id == expected_output(GREEDY)[0]
    # Every prompt token once, and the last again for its logits.
    assert runner.num_rows == len(PROMPT) + 1


def test_item_beyond_the_token_budget_is_served_in_several_forwards() -> None:
    target, runner = toy_target(max_num_batched_tokens=16)
    prompt = (PROMPT * 5)[:41]
    drafts = tuple(target_only(lambda prefix: model_logits(TARGET, prefix), prompt, GREEDY, 20))
    item = VerifyItem("a", 1, 0, tuple(prompt), draft=DraftTokens(drafts[:19]), sampling=GREEDY)
    [reply] = target.verify([item]).replies
    assert reply == Verdict("a", 1, 0, 19, drafts[19])
    assert [sum(len(part.token_ids) for part in step) for step in runner.steps] == [16, 16, 16, 12]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED, REJECTION])
def test_of_a_tree_the_first_chain_is_verified(sampling: SamplingParams) -> None:
    """The verdict and the rows are those of the chain, whatever else the tree holds."""
    output = expected_output(sampling)
    row = SparseProbs(tuple(range(VOCAB_SIZE)), (1 / VOCAB_SIZE,) * VOCAB_SIZE)
    probs = (row,) * 5 if sampling is REJECTION else ()
    other = (output[0] + 1) % VOCAB_SIZE
    tree = DraftTokens((output[0], other, other, output[1], output[2]), (-1, -1, 1, 0, 3), probs)
    chain = DraftTokens(tuple(output[:3]), probs=probs[:3])
    assert tree.first_chain() == chain
    replies = []
    for draft in (tree, chain):
        target, _ = toy_target()
        item = VerifyItem("a", 1, 0, tuple(PROMPT), draft, sampling=sampling)
        replies.append(target.verify([item, replace(item, round_id=2)]))
        target.check_integrity()
    assert replies[0].replies == replies[1].replies
    assert replies[0].num_rows == replies[1].num_rows
    verdict = replies[0].replies[0]
    assert isinstance(verdict, Verdict)
    assert sampling is REJECTION or verdict.num_accepted_tokens == 3


def test_whole_batch_is_one_forward() -> None:
    target, runner = toy_target()
    items = [VerifyItem(name, 1, 0, tuple(PROMPT), DraftTokens((1, 2)), sampling=GREEDY) for name in "abc"]
    items.append(VerifyItem("d", 1, 0, tuple(PROMPT), sample=False, sampling=GREEDY))
    target.verify(items)
    assert len(runner.steps) == 1


def test_resent_item_gets_the_same_verdict() -> None:
    target, _ = toy_target()
    current = session(PROCESSED)
    drafts = DraftTokens(tuple(expected_output(PROCESSED)[:3]))
    item = verify_item(current, drafts)
    assert target.verify([item]).replies == target.verify([item]).replies
    # Also twice within one batch.
    first, second = target.verify([item, item]).replies
    assert first == second == Verdict("a", 1, 0, 3, expected_output(PROCESSED)[3])


def test_rejected_tokens_are_not_held() -> None:
    target, _ = toy_target()
    current = session()
    wrong = (expected_output(GREEDY)[0] + 1) % VOCAB_SIZE
    target.verify([verify_item(current, DraftTokens((wrong, wrong)))])
    item = VerifyItem("a", 2, len(PROMPT) + 1, (1,))
    assert target.verify([item]).replies == (UnknownSequence("a", 2, len(PROMPT) + 1),)


def test_verdict_carries_logprobs_of_every_committed_token() -> None:
    target, _ = toy_target()
    output = expected_output(replace(PROCESSED, num_logprobs=2))
    current = session(replace(PROCESSED, num_logprobs=2))
    verdict = verify(target, current, DraftTokens((output[0], (output[1] + 1) % VOCAB_SIZE)))
    rows = torch.stack([model_logits(TARGET, PROMPT), model_logits(TARGET, [*PROMPT, output[0]])])
    assert verdict.logprobs == token_logprobs(rows, output[:2], 2)


BAD_ITEMS = {
    "token id": (VerifyItem("a", 1, 0, (1, VOCAB_SIZE), sampling=GREEDY), f"token_ids holds {VOCAB_SIZE}"),
    "negative id": (VerifyItem("a", 1, 0, (1, -1), sampling=GREEDY), "token_ids holds -1"),
    "draft id": (
        VerifyItem("a", 1, 0, (1,), DraftTokens((99,)), sampling=GREEDY),
        "draft.token_ids holds 99",
    ),
    "empty": (VerifyItem("a", 1, 0, (), sampling=GREEDY), "0 tokens"),
    "too long": (VerifyItem("a", 1, 0, (1,) * 97, sampling=GREEDY), "allowed: 1..96"),
    "drafts too long": (VerifyItem("a", 1, 0, (1,) * 95, DraftTokens((1, 2)), sampling=GREEDY), "97 tokens"),
    "base_len": (VerifyItem("a", 1, -1, (1,), sampling=GREEDY), "base_len is -1"),
    "no sampling": (VerifyItem("a", 1, 0, (1,)), "sampling is missing"),
    "chunk with drafts": (
        VerifyItem("a", 1, 0, (1,), DraftTokens((2,)), sample=False, sampling=GREEDY),
        "draft tokens",
    ),
    "probs nan": (
        VerifyItem(
            "a",
            1,
            0,
            (1,),
            DraftTokens((2,), probs=(SparseProbs((2,), (float("nan"),)),)),
            sampling=REJECTION,
        ),
        "no distribution",
    ),
    "probs zero": (
        VerifyItem(
            "a", 1, 0, (1,), DraftTokens((2,), probs=(SparseProbs((2,), (0.0,)),)), sampling=REJECTION
        ),
        "no distribution",
    ),
    "probs token": (
        VerifyItem(
            "a", 1, 0, (1,), DraftTokens((2,), probs=(SparseProbs((99,), (1.0,)),)), sampling=REJECTION
        ),
        "draft.probs holds 99",
    ),
    "probs twice": (
        VerifyItem(
            "a", 1, 0, (1,), DraftTokens((2,), probs=(SparseProbs((2, 2), (0.5, 0.5)),)), sampling=REJECTION
        ),
        "distinct",
    ),
}


@pytest.mark.parametrize(("item", "message"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_bad_item_fails_alone_and_for_good(item: VerifyItem, message: str) -> None:
    target, _ = toy_target()
    good = VerifyItem("b", 1, 0, tuple(PROMPT), sampling=GREEDY)
    failed, served = target.verify([item, good]).replies
    assert isinstance(failed, ItemFailed) and not failed.is_retriable
    assert message in failed.message
    assert served == Verdict("b", 1, 0, 0, expected_output(GREEDY)[0])
    assert_all_free(target)


def test_exception_in_one_items_postprocessing_hurts_no_other(caplog: pytest.LogCaptureFixture) -> None:
    target, _ = toy_target()
    broken = replace(REJECTION, seed="no number")  # type: ignore[arg-type]
    items = [
        VerifyItem("a", 1, 0, tuple(PROMPT), sampling=COUPLED),
        VerifyItem("b", 1, 0, tuple(PROMPT), DraftTokens((1,)), sampling=broken),
        VerifyItem("c", 1, 0, tuple(PROMPT), sampling=GREEDY),
    ]
    first, failed, last = target.verify(items).replies
    assert first == Verdict("a", 1, 0, 0, expected_output(COUPLED)[0])
    assert isinstance(failed, ItemFailed) and not failed.is_retriable and "TypeError" in failed.message
    assert last == Verdict("c", 1, 0, 0, expected_output(GREEDY)[0])
    assert "could not be verified together" in caplog.text


def test_no_room_is_retriable_and_changes_nothing() -> None:
    target, _ = toy_target(num_blocks=4, max_num_seqs=2)
    current = session()
    verify(target, current, NO_DRAFT)
    other = VerifyItem("b", 1, 0, tuple(PROMPT), sampling=GREEDY)
    [reply] = target.verify([other]).replies
    assert isinstance(reply, ItemFailed) and reply.is_retriable and "blocks" in reply.message
    target.check_integrity()
    target.release(["a"])
    assert target.verify([other]).replies == (Verdict("b", 1, 0, 0, expected_output(GREEDY)[0]),)


def test_one_sequence_too_many_is_retriable() -> None:
    target, _ = toy_target(max_num_seqs=1)
    items = [VerifyItem(name, 1, 0, (1,), sampling=GREEDY) for name in "ab"]
    first, second = target.verify(items).replies
    assert isinstance(first, Verdict)
    assert isinstance(second, ItemFailed) and second.is_retriable and "max_num_seqs" in second.message


def test_check_works_with_a_full_cache_and_finds_broken_logits() -> None:
    target, _ = toy_target(num_blocks=4)
    verify(target, session(), NO_DRAFT)
    assert target.num_free_blocks == 0
    target.check()

    class Broken(SlotRunner):
        def run(self, inputs: Sequence[object]) -> ForwardOutput:
            return ForwardOutput(torch.full((1, VOCAB_SIZE), torch.nan))

    broken = TargetEngine(Broken(TARGET, target.info), target.info, device=torch.device("cpu"))
    with pytest.raises(EngineLostError, match="not numbers"):
        broken.check()


# ---- the draft


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


def test_proposal_ends_at_max_model_len() -> None:
    draft, _ = toy_draft(max_model_len=12)
    for length, expected in ((9, 3), (11, 1), (12, 0)):
        drafted = propose(draft, Session("a", [1] * length, GREEDY), 5)
        assert len(drafted.token_ids) == expected
    [reply] = draft.speculate([SpeculateItem("a", 1, 0, (1,) * 13, 2, sampling=GREEDY)]).replies
    assert isinstance(reply, ItemFailed) and not reply.is_retriable and "1..12" in reply.message


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
