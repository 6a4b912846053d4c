"""Verdicts on trees over a model that can be computed by hand, edge by edge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.sampling.verify import Verified
from specray.types import ItemFailed, Verdict, VerifyItem
from tests.unit.engine.harness import TARGET, VOCAB_SIZE, model_logits, toy_target, verify
from tests.unit.engine.samplings import COUPLED, GREEDY, PROCESSED, PROMPT, expected_output, session

WRONG = VOCAB_SIZE - 1


def other(token_id: int, by: int = 1) -> int:
    return (token_id + by) % VOCAB_SIZE


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED], ids=["greedy", "coupled", "processed"])
def test_verdict_names_the_last_node_of_the_path(sampling: object) -> None:
    output = expected_output(sampling)  # type: ignore[arg-type]
    #   0: wrong    1: right ── 3: wrong
    #   └ 2: right there        4: right ── 5: right
    tree = DraftTokens(
        (other(output[0]), output[0], output[1], other(output[1]), output[1], output[2]), (-1, -1, 0, 1, 1, 4)
    )
    target, runner = toy_target()
    item = VerifyItem("a", 1, 0, tuple(PROMPT), tree, sampling=sampling)  # type: ignore[arg-type]
    replies = target.verify([item])
    assert replies.replies == (Verdict("a", 1, 0, 3, output[3], last_accepted_node=5),)
    assert replies.num_rows == len(PROMPT) + 6
    assert len(runner.steps) == 1
    # What is kept is held: it is told again and is no row of the next step.
    next_item = VerifyItem("a", 2, len(PROMPT), tuple(output[:4]), DraftTokens((output[4],)))
    replies = target.verify([next_item])
    assert replies.replies == (Verdict("a", 2, len(PROMPT), 1, output[5]),)
    assert replies.num_rows == 2


def test_right_tokens_below_a_wrong_node_count_for_nothing() -> None:
    output = expected_output(GREEDY)
    tree = DraftTokens((other(output[0]), output[0], output[1], output[2]), (-1, -1, 0, 2))
    target, _ = toy_target()
    current = session()
    verdict = verify(target, current, tree)
    assert (verdict.num_accepted_tokens, verdict.last_accepted_node) == (1, 1)
    assert verdict.next_token_id == output[1]
    assert verify(target, current, NO_DRAFT).next_token_id == output[2]


def test_nothing_of_a_tree_is_kept() -> None:
    output = expected_output(GREEDY)
    tree = DraftTokens((other(output[0]), other(output[0], 2), output[1]), (-1, -1, 0))
    target, runner = toy_target()
    [reply] = target.verify([VerifyItem("a", 1, 0, tuple(PROMPT), tree, sampling=GREEDY)]).replies
    assert reply == Verdict("a", 1, 0, 0, output[0])
    assert not runner.pending_moves


def test_equal_siblings_are_one_node() -> None:
    """The path goes through the one that has the right child, wherever that is."""
    output = expected_output(GREEDY)
    tree = DraftTokens((output[0], output[0], other(output[1]), output[1], output[2]), (-1, -1, 0, 1, 3))
    target, _ = toy_target()
    current = session()
    verdict = verify(target, current, tree)
    assert (verdict.num_accepted_tokens, verdict.last_accepted_node) == (3, 4)
    assert verify(target, current, NO_DRAFT).next_token_id == output[4]


def test_tree_of_as_many_nodes_as_there_can_be() -> None:
    """A spine of right tokens, each with a wrong sibling before it."""
    output = expected_output(GREEDY, 40)
    tokens, parents, last = [], [], -1
    for token_id in output[:32]:
        tokens += [other(token_id), token_id]
        parents += [last, last]
        last = len(tokens) - 1
    target, _ = toy_target(max_num_batched_tokens=128)
    current = session()
    verdict = verify(target, current, DraftTokens(tuple(tokens), tuple(parents)))
    assert (verdict.num_accepted_tokens, verdict.next_token_id) == (32, output[32])
    assert verdict.last_accepted_node == 63
    assert verify(target, current, NO_DRAFT).next_token_id == output[33]


def test_a_tree_is_cut_to_what_fits_behind_the_sequence() -> None:
    """Its nodes take slots one after the other, though their positions would fit."""
    output = expected_output(GREEDY, 16)
    target, _ = toy_target(max_model_len=len(PROMPT) + 3, block_size=4)
    tree = DraftTokens((other(output[0]), output[0], other(output[1]), output[1]), (-1, -1, 1, 1))
    [reply] = target.verify([VerifyItem("a", 1, 0, tuple(PROMPT), tree, sampling=GREEDY)]).replies
    assert reply == Verdict("a", 1, 0, 1, output[1], last_accepted_node=1)
    full = VerifyItem("b", 1, 0, (*PROMPT, *output[:3]), tree, sampling=GREEDY)
    assert target.verify([full]).replies == (Verdict("b", 1, 0, 0, output[3]),)
    target.check_integrity()


def test_a_node_outside_the_vocabulary_is_refused() -> None:
    target, _ = toy_target()
    item = VerifyItem("a", 1, 0, tuple(PROMPT), DraftTokens((1, 99), (-1, -1)), sampling=GREEDY)
    [reply] = target.verify([item]).replies
    assert isinstance(reply, ItemFailed) and "draft.token_ids holds 99" in reply.message


def test_nodes_of_a_step_that_failed_do_not_count_as_computed(caplog: pytest.LogCaptureFixture) -> None:
    """Two siblings in a row look like a chain; the second was computed beside the first, not behind it."""
    output = expected_output(GREEDY)
    target, _ = toy_target()
    sampler = target._sampler

    class Failing:
        def verify(self, *_: object) -> list[Verified]:
            raise RuntimeError("no verdict")

    target._sampler = Failing()  # type: ignore[assignment]
    siblings = DraftTokens((output[0], output[1]), (-1, -1))
    [failed] = target.verify([VerifyItem("a", 1, 0, tuple(PROMPT), siblings, sampling=GREEDY)]).replies
    assert isinstance(failed, ItemFailed) and "could not be verified together" in caplog.text
    target._sampler = sampler
    told = VerifyItem("a", 2, len(PROMPT), (output[0], output[1], output[2]))
    assert target.verify([told]).replies == (Verdict("a", 2, len(PROMPT), 0, output[3]),)


def test_an_earlier_base_takes_back_what_was_kept_of_a_tree() -> None:
    output = expected_output(GREEDY)
    target, _ = toy_target()
    tree = DraftTokens((other(output[0]), output[0], output[1]), (-1, -1, 1))
    current = session()
    verify(target, current, tree)
    wrong = tuple(other(token_id) for token_id in output[:2])
    again = VerifyItem("a", 9, len(PROMPT), (*wrong, WRONG))
    prefix = [*PROMPT, *wrong, WRONG]
    [reply] = target.verify([again]).replies
    assert isinstance(reply, Verdict)
    assert reply.next_token_id == int(model_logits(TARGET, prefix).argmax())


def test_prompt_logprobs_come_beside_a_tree() -> None:
    sampling = replace(GREEDY, num_prompt_logprobs=1)
    output = expected_output(GREEDY)
    tree = DraftTokens((other(output[0]), output[0]), (-1, -1))
    target, _ = toy_target()
    with_tree, without = (
        target.verify([VerifyItem(name, 1, 0, tuple(PROMPT), draft, sampling=sampling)]).replies[0]
        for name, draft in (("a", tree), ("b", NO_DRAFT))
    )
    assert isinstance(with_tree, Verdict) and isinstance(without, Verdict)
    assert len(with_tree.prompt_logprobs) == len(PROMPT) - 1
    assert with_tree.prompt_logprobs == without.prompt_logprobs
    assert (with_tree.num_accepted_tokens, with_tree.next_token_id) == (1, output[1])
