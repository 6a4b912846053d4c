"""The target's verdicts over a model that can be computed by hand, and items that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens, SparseProbs
from specray.engine.sampling.logprobs import token_logprobs
from specray.engine.step import ForwardOutput
from specray.engine.target.engine import TargetEngine
from specray.errors import EngineLostError
from specray.types import ItemFailed, UnknownSequence, Verdict, VerifyItem
from tests.unit.engine.harness import (
    TARGET,
    VOCAB_SIZE,
    SlotRunner,
    model_logits,
    target_only,
    toy_target,
    verify,
    verify_item,
)
from tests.unit.engine.samplings import (
    COUPLED,
    GREEDY,
    PROCESSED,
    PROMPT,
    REJECTION,
    assert_all_free,
    expected_output,
    session,
)


def test_accepted_draft_tokens_are_told_again_and_are_no_rows_of_the_next_step() -> None:
    output, target = expected_output(GREEDY), toy_target()[0]
    items = [
        VerifyItem("a", 1, 0, tuple(PROMPT), sampling=GREEDY),
        VerifyItem("a", 2, len(PROMPT), (output[0],), DraftTokens(tuple(output[1:4]))),
        VerifyItem("a", 3, len(PROMPT) + 1, tuple(output[1:5]), DraftTokens((output[5], VOCAB_SIZE - 1))),
    ]
    assert [target.verify([item]).num_rows for item in items] == [len(PROMPT), 4, 3]


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


def test_of_a_tree_that_was_sampled_the_first_chain_is_verified() -> None:
    """The verdict and the rows are those of the chain, whatever else the tree holds."""
    sampling = REJECTION
    output = expected_output(sampling)
    row = SparseProbs(tuple(range(VOCAB_SIZE)), (1 / VOCAB_SIZE,) * VOCAB_SIZE)
    probs = (row,) * 5
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
    assert target.info.num_blocks_in_use == target.info.num_blocks - 1
    target.check()

    class Broken(SlotRunner):
        def run(self, inputs: Sequence[object]) -> ForwardOutput:
            return ForwardOutput(torch.full((1, VOCAB_SIZE), torch.nan))

    broken = TargetEngine(Broken(TARGET, target.info), target.info, device=torch.device("cpu"))
    with pytest.raises(EngineLostError, match="not numbers"):
        broken.check()
