"""Outcomes of a tree under verification: which the draft prepares, what they hold, and what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.engine.drafting.engine import DraftEngine
from specray.engine.sampling.draws import SCORE_SPREAD
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.verify import add_draw_noise
from specray.types import Branch, Outcomes, SamplingParams, Verdict
from tests.unit.engine.draft_view.toys import toy_viewer
from tests.unit.engine.harness import (
    CLOSE,
    TARGET,
    VOCAB_SIZE,
    Session,
    commit,
    model_logits,
    propose,
    speculate_item,
    table,
    toy_draft,
    toy_target,
    verify_item,
)
from tests.unit.engine.sampling.rows import row_group
from tests.unit.engine.samplings import (
    COUPLED,
    GREEDY,
    NUM_OUTPUT,
    PROCESSED,
    PROMPT,
    assert_all_free,
    expected_output,
    session,
)
from tests.unit.engine.trees.random_trees import Shape, shaped_drafter, shapes
from tests.unit.engine.trees.test_draft_trees import propose_tree

#       root
#      /    \
#     0      3
#    / \     |
#   1   4    5
#   |        |
#   2        6
PARENTS = (-1, 0, 1, -1, 0, 3, 5)
FAR = table(error=1.0)
TREE = DraftTokens((3, 1, 4, 9, 2, 6, 5), PARENTS)


def outcomes(
    draft: DraftEngine, current: Session, tree: DraftTokens, most: int, *, width: int, branches: int = 0
) -> Outcomes:
    """The draft's answer for a tree, its nodes by their own index."""
    asked = tree.only(tree.chain_first)
    item = speculate_item(current, most, proposed=asked.token_ids, fanout=(width,) * (len(tree) + 1))
    [reply] = draft.speculate([replace(item, proposed_parents=asked.parents, max_branches=branches)]).replies
    assert isinstance(reply, Outcomes), reply
    return reply


def node_of(tree: DraftTokens, branch: Branch) -> int:
    place = branch.num_accepted_tokens - 1
    if branch.last_accepted_node is not None:
        place = branch.last_accepted_node
    return tree.chain_first[place] if place >= 0 else -1


def found_in(tree: DraftTokens, reply: Outcomes) -> dict[tuple[int, int], DraftTokens]:
    return {(node_of(tree, branch), branch.next_token_id): branch.draft for branch in reply.branches}


def path_tokens(tree: DraftTokens, node: int) -> list[int]:
    return [tree.token_ids[index] for index in tree.path(node)]


def children(tree: DraftTokens, node: int) -> set[int]:
    return {token for token, parent in zip(tree.token_ids, tree.parents or (), strict=True) if parent == node}


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED], ids=["greedy", "coupled", "processed"])
def test_every_node_has_the_continuations_of_its_own_path(sampling: SamplingParams) -> None:
    draft, _ = toy_draft(num_blocks=400)
    reply = outcomes(draft, session(sampling), TREE, 3, width=2)
    found = found_in(TREE, reply)
    assert len(found) == len(reply.branches) == 2 * 8
    for (node, token), drafted in found.items():
        assert token not in children(TREE, node)
        fresh = Session("a", [*PROMPT, *path_tokens(TREE, node), token], sampling)
        assert drafted == propose(toy_draft()[0], fresh, 3), (node, token)
    for branch in reply.branches:
        assert branch.num_accepted_tokens == len(TREE.path(node_of(TREE, branch)))
        assert (branch.last_accepted_node is None) == (node_of(TREE, branch) in (-1, 0, 1, 2))
    draft.check_integrity()
    assert_all_free(draft)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("most", [3, 9, 16])
def test_branches_are_the_likeliest_ends_of_the_walk(sampling: SamplingParams, most: int) -> None:
    """By the chance that the walk comes to a node, times that of the next token behind it."""
    draft, _ = toy_draft(num_blocks=400)
    current = session(sampling)
    tree = propose_tree(draft, current, 3, TreeBudget.of_widths((2, 2, 1)))
    expected: dict[tuple[int, int], float] = {}
    reached = {-1: 0.0}
    for node in range(-1, len(tree)):
        below = [child for child, parent in enumerate(tree.parents or ()) if parent == node]
        chances = best_tokens(sampling, path_tokens(tree, node), 4 + len(below))
        for child in below:
            reached[child] = reached[node] + chances.pop(tree.token_ids[child], -20.0)
        expected |= {(node, token): reached[node] + chance for token, chance in chances.items()}
    likeliest = sorted(expected, key=lambda outcome: -expected[outcome])[:most]
    reply = outcomes(draft, current, tree, 0, width=4, branches=most)
    assert set(found_in(tree, reply)) == set(likeliest)
    beside = {node for node, _ in likeliest} - {-1, *tree.first_path}
    assert beside or most == 3, "some are beside the first chain"


def best_tokens(sampling: SamplingParams, path: Sequence[int], count: int) -> dict[int, float]:
    """The best tokens behind a path, and the log of their chance among the nine or so that are looked at."""
    prefix = [*PROMPT, *path]
    group = row_group(sampling, prefix, 1)
    noise = NoiseSource(VOCAB_SIZE, max_cached_bytes=0)
    row = process_logits(model_logits(CLOSE, prefix)[None], [group])
    values, tokens = add_draw_noise(row, [group], noise)[0].topk(8 + 1)
    logprobs = (values / SCORE_SPREAD).log_softmax(-1)
    return dict(list(zip(tokens.tolist(), logprobs.tolist(), strict=True))[:count])


def test_one_forward_ranks_all_nodes_and_one_a_step_continues_all_branches() -> None:
    draft, runner = toy_draft(num_blocks=400)
    current = session()
    propose_tree(draft, current, 3, TreeBudget.of_widths((2, 1, 1)))
    before = len(runner.steps)
    reply = outcomes(draft, current, TREE, 3, width=2, branches=6)
    assert len(reply.branches) == 6
    steps = [sum(len(item.token_ids) for item in step) for step in runner.steps[before:]]
    # The root's row and one for each node; then every branch's next token, and its draft tokens but the last.
    assert steps == [1 + 7, 6, 6, 6]
    draft.check_integrity()


def test_first_chain_stays_computed_beside_other_nodes() -> None:
    draft, runner = toy_draft(TARGET)
    output = expected_output(GREEDY)
    tree = DraftTokens((*output[:2], 21, 22), (-1, 0, -1, 2))
    current = session()
    found = found_in(tree, outcomes(draft, current, tree, 3, width=1))
    assert found[1, output[2]].token_ids == tuple(output[3:6])
    before = runner.num_rows
    current.token_ids += output[:3]
    assert propose(draft, current, 3).token_ids == tuple(output[3:6])
    # The chain is computed; the verdict's own token gives logits, then each draft token but the last.
    assert runner.num_rows - before == 3


@settings(max_examples=6, deadline=None)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED], ids=["greedy", "coupled", "processed"])
@pytest.mark.parametrize("room", [{"block_size": 4, "num_blocks": 800}, {"max_num_batched_tokens": 5}])
@given(rounds=st.lists(shapes(max_nodes=10), min_size=1, max_size=4))
def test_output_is_the_targets_alone_with_outcomes_of_any_tree(
    room: dict[str, Any], sampling: SamplingParams, rounds: list[Shape]
) -> None:
    """Trees of any shape that hold the output here and there; what follows a hit is a chain."""
    output = expected_output(sampling, NUM_OUTPUT + 15)
    draft, _ = toy_draft(FAR, **{"num_blocks": 400, **room})
    target, _ = toy_target(num_blocks=400)
    drafter = shaped_drafter(rounds, output, len(PROMPT), VOCAB_SIZE)
    current, drafted, hits = session(sampling), NO_DRAFT, []
    while len(current.token_ids) < len(PROMPT) + NUM_OUTPUT:
        drafted = drafted if len(drafted) else drafter(current, 0)
        found = found_in(drafted, outcomes(draft, current, drafted, 2, width=VOCAB_SIZE))
        [verdict] = target.verify([verify_item(current, drafted)]).replies
        assert isinstance(verdict, Verdict)
        before = len(current.token_ids)
        commit(current, drafted, verdict)
        last = verdict.last_accepted_node
        if last is None:
            last = drafted.first_path[verdict.num_accepted_tokens - 1] if verdict.num_accepted_tokens else -1
        assert verdict.next_token_id is not None
        followed = found.get((last, verdict.next_token_id))
        is_beside = last not in (-1, *drafted.first_path)
        # Only a branch that must see rows far away, or one that no block is left for, is missing.
        hits.append((followed is not None, is_beside))
        if followed is not None and len(followed):
            fresh = Session("a", list(current.token_ids), sampling)
            assert followed == propose(toy_draft(FAR)[0], fresh, 2)
        drafted = (followed or NO_DRAFT) if before % 3 else NO_DRAFT
        draft.check_integrity()
    assert current.token_ids[len(PROMPT) :][:NUM_OUTPUT] == output[:NUM_OUTPUT]
    assert all(is_hit for is_hit, is_beside in hits if not is_beside)
    assert_all_free(draft)
    assert_all_free(target)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_verdict_beside_the_first_chain_is_a_hit(sampling: SamplingParams) -> None:
    """The second path is the target's: its outcome is prepared, with what the draft says behind it."""
    output = expected_output(sampling)
    wrong = [(token + 1) % VOCAB_SIZE for token in output]
    tree = DraftTokens((wrong[0], wrong[1], output[0], output[1]), (-1, 0, -1, 2))
    draft, _ = toy_draft(TARGET)
    target, _ = toy_target()
    current = session(sampling)
    reply = outcomes(draft, current, tree, 3, width=2, branches=4)
    [verdict] = target.verify([verify_item(current, tree)]).replies
    assert isinstance(verdict, Verdict)
    assert (verdict.num_accepted_tokens, verdict.last_accepted_node) == (2, 3)
    assert found_in(tree, reply)[3, output[2]] == DraftTokens(tuple(output[3:6]))


def test_without_blocks_for_the_other_nodes_the_first_chain_has_its_outcomes() -> None:
    draft, _ = toy_draft(num_blocks=5)
    reply = outcomes(draft, session(), TREE, 2, width=1)
    assert {node_of(TREE, branch) for branch in reply.branches} <= {-1, 0, 1, 2}
    assert len(reply.branches) >= 1
    assert_all_free(draft)


def test_nodes_as_deep_as_the_model_is_long_have_no_branches() -> None:
    draft, _ = toy_draft(max_model_len=len(PROMPT) + 3)
    reply = outcomes(draft, session(), TREE, 4, width=1)
    assert [(node_of(TREE, one), len(one.draft)) for one in reply.branches] == [
        (-1, 2),
        (0, 1),
        (1, 0),
        (3, 1),
        (4, 0),
        (5, 0),
    ]


def test_branches_beyond_what_a_mask_can_tell_are_left_out() -> None:
    """Nodes beside the chain and the branches behind them lie within 64 rows of a branch's first node."""
    draft, runner = toy_draft(num_blocks=400, max_model_len=200)
    wide = DraftTokens((0, *range(1, 20)), (-1,) * 20)
    reply = outcomes(draft, session(), wide, 8, width=1)
    beside = [branch for branch in reply.branches if branch.last_accepted_node is not None]
    assert 0 < len(beside) < 19
    assert {node_of(wide, branch) for branch in reply.branches} >= {-1, 0}
    masks = [row.ancestors for step in runner.steps for item in step for row in item.visibility]
    assert max(masks).bit_length() <= 64
    for branch in reply.branches:
        path = path_tokens(wide, node_of(wide, branch))
        fresh = Session("a", [*PROMPT, *path, branch.next_token_id], GREEDY)
        assert branch.draft == propose(toy_draft()[0], fresh, 8)


@pytest.mark.parametrize("reading", ["intersect", "retokenize"])
def test_draft_of_other_tokens_answers_for_the_first_chain(
    reading: Literal["intersect", "retokenize"],
) -> None:
    draft, _ = toy_viewer(reading)
    reply = outcomes(draft, session(), TREE, 2, width=2)
    assert all(branch.last_accepted_node is None for branch in reply.branches)
    assert (len(reply.branches) > 0) == (reading == "intersect")
    assert_all_free(draft)


def test_chance_of_an_unranked_child_is_small_but_not_none() -> None:
    """A child that the draft itself would hardly say: what follows it comes last."""
    rows = torch.full((1021, VOCAB_SIZE), 0.0)
    rows[:, 7] = 9.0
    draft, _ = toy_draft(rows, num_blocks=400)
    tree = DraftTokens((7, 7, 20), (-1, 0, -1))
    reply = outcomes(draft, session(), tree, 1, width=1)
    assert {node_of(tree, branch) for branch in reply.branches} == {-1, 0, 1, 2}
    one = outcomes(draft, session(request_id="b"), tree, 1, width=1, branches=1)
    assert [node_of(tree, branch) for branch in one.branches] == [1]
