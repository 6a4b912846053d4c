"""Lookahead decoding: the window's rows beside a step, its n-grams, and outputs that stay the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget
from specray.engine.target.engine import TargetEngine
from specray.engine.target.lookahead import GuessWindow, NgramPool
from specray.types import Verdict
from tests.unit.engine.harness import TARGET, Session, commit, model_logits, toy_target, verify_item
from tests.unit.engine.samplings import (
    COUPLED,
    GREEDY,
    PROMPT,
    REJECTION,
    assert_all_free,
    expected_output,
    session,
)


def best(prefix: list[int]) -> int:
    return int(model_logits(TARGET, prefix).argmax())


def step(
    target: TargetEngine, current: Session, drafted: DraftTokens, budget: LookaheadBudget | None
) -> DraftTokens:
    """A round; what the target proposes for the next."""
    [reply] = target.verify([replace(verify_item(current, drafted), lookahead=budget)]).replies
    assert isinstance(reply, Verdict), reply
    commit(current, drafted, reply)
    return reply.draft


def test_budget_is_checked() -> None:
    assert LookaheadBudget().max_window_rows == 27 and LookaheadBudget().max_guess_rows == 28
    assert str(LookaheadBudget(3, 4, 2)) == "3x4x2"
    for values, message in (
        ((0, 5, 7), "width 0"),
        ((7, 1, 7), "n-grams of 1 tokens"),
        ((7, 5, 0), "0 guesses"),
        ((8, 5, 9), "8x5x9 takes 67 rows; allowed: at most 64"),
    ):
        with pytest.raises(ValueError, match=message):
            LookaheadBudget(*values)


def test_pool_keeps_the_latest_ngrams_of_each_first_token() -> None:
    pool = NgramPool(3, 2)
    pool.add_text([1, 2, 3, 1, 2, 4])
    assert pool.draft(1, num_nodes=9) == DraftTokens((2, 4, 3), (-1, 0, 0))
    pool.add([1, 2, 3])
    pool.add([1, 5, 6])
    # 1 2 4 was the oldest.
    assert pool.draft(1, num_nodes=9) == DraftTokens((5, 6, 2, 3), (-1, 0, -1, 2))
    assert pool.draft(1, num_nodes=3) == DraftTokens((5, 6, 2), (-1, 0, -1))
    assert pool.draft(4, num_nodes=9) == NO_DRAFT


def test_window_fills_its_levels_and_then_moves_down() -> None:
    window = GuessWindow(LookaheadBudget(3, 4, 2), range(100, 120))
    assert (window.token_ids, window.parents) == ([119, 118, 117, 116], [-1, 0, 1, 2])
    assert window.advance(1, [10, 11, 12, 13, 14]) == []
    assert (window.token_ids, window.parents) == ([118, 117, 116, 11, 12, 13, 14], [-1, 0, 1, -1, 0, 1, 2])
    assert window.advance(2, [20, 21, 22, 23]) == []
    full = [-1, 0, -1, 0, 1, 2, 3, 4]
    assert (window.token_ids, window.parents) == ([117, 116, 12, 13, 14, 21, 22, 23], full)
    assert window.advance(3, [30, 31, 32]) == [[3, 12, 21, 30], [117, 13, 22, 31], [116, 14, 23, 32]]
    assert (window.token_ids, window.parents) == ([13, 14, 21, 22, 23, 30, 31, 32], full)
    assert window.advance(4, [40, 41, 42]) == [[4, 21, 30, 40], [13, 22, 31, 41], [14, 23, 32, 42]]


def test_window_rows_see_what_a_jacobi_iteration_is_about() -> None:
    """The n-gram of column 0 is the target's own guess of a guess: each token is the best behind those before
    it, in the iteration that made it."""
    target, runner = toy_target()
    budget = LookaheadBudget(2, 3, 4)
    current = session(GREEDY)
    step(target, current, NO_DRAFT, budget)
    # A window of one level with three columns: the first guesses, then outputs behind root, a1 and a2.
    rows = runner.steps[-1][0]
    assert len(rows.token_ids) == len(PROMPT) + 2
    first = [PROMPT[7919 * column % len(PROMPT)] for column in range(3)]
    a1, a2 = first[1:]
    assert list(rows.token_ids[-2:]) == [a1, a2]
    outputs = [best([*PROMPT, *behind]) for behind in ([], [a1], [a1, a2])]
    step(target, current, NO_DRAFT, budget)
    rows = runner.steps[-1][0]
    root = current.token_ids[-2]
    prefix = current.token_ids[:-1]
    # Levels move left: level 0 is root and a2, level 1 what was said behind a1 and a2.
    assert list(rows.token_ids) == [root, a2, outputs[1], outputs[2]]
    ngrams = [
        (root, outputs[1], best([*prefix, outputs[1]])),
        (a2, outputs[2], best([*prefix, a2, outputs[2]])),
    ]
    lookahead = target._lookaheads["a"]
    for first_token, second, third in ngrams:
        drafted = lookahead._pool.draft(first_token, num_nodes=12)
        chains = [tuple(drafted.token_ids[node] for node in drafted.path(i)) for i in range(len(drafted))]
        assert (second, third) in chains


def test_a_periodic_prompt_is_proposed_from_the_first_verdict_on() -> None:
    target, _ = toy_target()
    biased = replace(GREEDY, logit_bias=((4, 90.0),), num_prompt_tokens=12)
    current = Session("a", [1, 4, 4, 4, 4, 4] * 2, biased)
    offered = step(target, current, NO_DRAFT, LookaheadBudget())
    assert offered.first_chain().token_ids[:2] == (4, 4)
    step(target, current, offered, LookaheadBudget())
    assert current.accepted[-1] >= 3


def test_window_rows_are_not_kept() -> None:
    """Each round computes the tokens that were committed, its drafts and its window, and nothing again."""
    target, runner = toy_target()
    budget = LookaheadBudget(3, 4, 2)
    current = session(GREEDY)
    step(target, current, NO_DRAFT, budget)
    for round_index in range(8):
        before, known = runner.num_rows, len(current.token_ids)
        drafted = DraftTokens(tuple(best_chain(current.token_ids, round_index % 4)))
        replies = target.verify([replace(verify_item(current, drafted), lookahead=budget)])
        num_rows = 1 + len(drafted) + len_of_rows(round_index)
        assert runner.num_rows - before == num_rows == replies.num_rows
        [verdict] = replies.replies
        assert isinstance(verdict, Verdict)
        commit(current, drafted, verdict)
        assert len(current.token_ids) == known + len(drafted) + 1


def len_of_rows(round_index: int) -> int:
    """Rows of a window of three columns and three levels, which are there from its third step on."""
    return [7, 8][min(1, round_index)]


def best_chain(prefix: list[int], count: int) -> list[int]:
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(best(tokens))
    return tokens[len(prefix) :]


def test_rows_that_do_not_fit_are_left_out() -> None:
    budget = LookaheadBudget()
    target, runner = toy_target(max_model_len=20)
    current = session(GREEDY)
    for _ in range(8):
        step(target, current, NO_DRAFT, budget)
    assert current.token_ids[len(PROMPT) :] == expected_output(GREEDY)[:8]
    assert len(runner.steps[-1][0].token_ids) == 1
    assert_all_free(target)
    # Without blocks for the window there is none; the request goes on.
    target, runner = toy_target(num_blocks=6)
    current = session(COUPLED)
    for _ in range(8):
        step(target, current, NO_DRAFT, budget)
    assert current.token_ids[len(PROMPT) :] == expected_output(COUPLED)[:8]
    assert_all_free(target)


def test_lookahead_shares_steps_with_others_and_scores_of_prompts() -> None:
    budget = LookaheadBudget(3, 4, 2)
    target, _ = toy_target(max_num_batched_tokens=16)
    sampling = {"a": GREEDY, "b": COUPLED, "c": replace(GREEDY, num_prompt_logprobs=2), "d": REJECTION}
    current = {name: session(each, request_id=name) for name, each in sampling.items()}
    offered = dict.fromkeys(current, NO_DRAFT)
    for round_index in range(8):
        names = [name for name in current if name != "b" or round_index != 3]
        items = [
            replace(verify_item(current[name], offered[name]), lookahead=budget if name != "d" else None)
            for name in names
        ]
        for name, reply in zip(names, target.verify(items).replies, strict=True):
            assert isinstance(reply, Verdict)
            commit(current[name], offered[name], reply)
            offered[name] = reply.draft
            if name == "c" and round_index == 0:
                assert len(reply.prompt_logprobs) == len(PROMPT) - 1
    for name in "abc":
        output = current[name].token_ids[len(PROMPT) :]
        assert output == expected_output(sampling[name], len(output))
    assert offered["d"] == NO_DRAFT
    assert_all_free(target)
