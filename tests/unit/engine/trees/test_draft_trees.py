"""The draft's trees: which nodes they have, what their forwards compute, and what stays computed after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specray.draft_tokens import DraftTokens, TreeBudget
from specray.engine.drafting.engine import DraftEngine
from specray.engine.drafting.trees import CHILDREN, REACHED, SPREAD
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.verify import add_draw_noise
from specray.types import Proposal, SamplingParams
from tests.unit.engine.harness import (
    CLOSE,
    NUM_ROWS,
    VOCAB_SIZE,
    Session,
    model_logits,
    propose,
    speculate_item,
    toy_draft,
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


def propose_tree(
    draft: DraftEngine, current: Session, depth: int, budget: TreeBudget, *, min_acceptance: float = 0.0
) -> DraftTokens:
    item = replace(speculate_item(current, depth), tree=budget, min_acceptance=min_acceptance)
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, Proposal), reply
    return reply.draft


def children(sampling: SamplingParams, prefix: Sequence[int]) -> list[tuple[int, float]]:
    """The best tokens after a prefix by definition, and the log of their estimated chance."""
    row = model_logits(CLOSE, prefix)[None]
    group = row_group(sampling, prefix, 1)
    noise = NoiseSource(VOCAB_SIZE, max_cached_bytes=0)
    scores = add_draw_noise(process_logits(row, [group]), [group], noise)[0]
    values, token_ids = scores.topk(CHILDREN)
    logprobs = (values / SPREAD).log_softmax(-1) + math.log(REACHED)
    ranked = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    return [(token, logprob) for token, logprob in ranked if logprob > -math.inf]


def best_tree(sampling: SamplingParams, prefix: Sequence[int], depth: int, num_nodes: int) -> DraftTokens:
    """Of all paths of at most ``depth`` tokens, those of the likeliest nodes."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(depth):
        level = [
            (reached + logprob, (*path, token))
            for reached, path in level
            for token, logprob in children(sampling, [*prefix, *path])
        ]
        paths += level
    best = [path for _, path in sorted(paths, key=lambda one: -one[0])[:num_nodes]]
    places = {path: place for place, path in enumerate(best)}
    parents = tuple(places[path[:-1]] if len(path) > 1 else -1 for path in best)
    return DraftTokens(tuple(path[-1] for path in best), parents)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("num_nodes", [1, 6, 15])
def test_tree_has_the_likeliest_of_all_nodes(sampling: SamplingParams, num_nodes: int) -> None:
    draft, _ = toy_draft()
    tree = propose_tree(draft, session(sampling), 3, TreeBudget(num_nodes))
    assert tree == best_tree(sampling, PROMPT, 3, num_nodes)
    assert len(tree) == num_nodes
    draft.check_integrity()


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, PROCESSED], ids=["greedy", "coupled", "processed"])
def test_first_chain_is_what_a_chain_draws(sampling: SamplingParams) -> None:
    for length in range(3, 10):
        current = Session("a", PROMPT[:length], sampling)
        chain = propose(toy_draft()[0], replace_lens(current), 4)
        tree = propose_tree(toy_draft()[0], replace_lens(current), 4, TreeBudget(24))
        first = tree.first_chain().token_ids
        assert len(first) >= 1 and first == chain.token_ids[: len(first)]
        shaped = propose_tree(toy_draft()[0], replace_lens(current), 4, TreeBudget.of_widths((3, 2, 1, 1)))
        assert shaped.first_chain().token_ids == chain.token_ids


def replace_lens(current: Session) -> Session:
    return Session(current.request_id, list(current.token_ids), current.sampling)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_shape_has_the_best_children_of_every_node(sampling: SamplingParams) -> None:
    draft, runner = toy_draft()
    tree = propose_tree(draft, session(sampling), 3, TreeBudget.of_widths((3, 2, 1)))
    expected: set[tuple[int, ...]] = set()
    level: list[tuple[int, ...]] = [()]
    for width in (3, 2, 1):
        level = [
            (*path, token) for path in level for token, _ in children(sampling, [*PROMPT, *path])[:width]
        ]
        expected |= set(level)
    assert paths_of(tree) == expected and len(tree) == 15
    # The prompt, then all nodes of a depth in one forward; the last depth is not computed.
    assert [sum(len(item.token_ids) for item in step) for step in runner.steps] == [len(PROMPT), 3, 6]
    draft.check_integrity()


def paths_of(tree: DraftTokens) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    parents = tree.parents or range(-1, len(tree) - 1)
    for token, parent in zip(tree.token_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def test_shape_is_no_deeper_than_what_was_asked_for() -> None:
    draft, _ = toy_draft(max_model_len=len(PROMPT) + 2)
    tree = propose_tree(draft, session(), 3, TreeBudget.of_widths((2, 1, 1)))
    assert sorted(tree.depths) == [0, 0, 1, 1]
    full = Session("b", [1] * (len(PROMPT) + 2), GREEDY)
    assert propose_tree(draft, full, 3, TreeBudget(4)) == DraftTokens()


def test_unlikely_nodes_are_left_out_and_no_step_is_made_for_unlikely_leaves() -> None:
    whole = best_tree(GREEDY, PROMPT, 3, 64)
    chances = chances_of(GREEDY, whole)
    bound = sorted(chances, reverse=True)[8]
    tree = propose_tree(toy_draft()[0], session(), 3, TreeBudget(64, min_chance=0.999 * bound))
    assert tree == whole.first(9)
    # Leaves of a depth, together: the next step is made as long as one of them is reached often enough.
    first = sum(chance for chance, depth in zip(chances, whole.depths, strict=True) if depth == 0)
    draft, runner = toy_draft()
    propose_tree(draft, session(), 3, TreeBudget(64), min_acceptance=min(0.999, 0.999 * first))
    assert len(runner.steps) >= 2
    draft, runner = toy_draft()
    alone = propose_tree(draft, session(), 3, TreeBudget(1), min_acceptance=0.9999)
    assert (len(alone), len(runner.steps)) == (1, 1), "the first token is always there"


def chances_of(sampling: SamplingParams, tree: DraftTokens) -> list[float]:
    chances: list[float] = []
    paths: list[tuple[int, ...]] = []
    parents = tree.parents or range(-1, len(tree) - 1)
    for token, parent in zip(tree.token_ids, parents, strict=True):
        before = paths[parent] if parent >= 0 else ()
        share = math.exp(dict(children(sampling, [*PROMPT, *before]))[token])
        chances.append(share * (chances[parent] if parent >= 0 else 1.0))
        paths.append((*before, token))
    return chances


def test_rejection_gets_its_chain() -> None:
    alone = propose(toy_draft()[0], session(REJECTION), 4)
    assert propose_tree(toy_draft()[0], session(REJECTION), 4, TreeBudget(16)) == alone
    assert len(alone.probs) == 4


def test_batch_of_trees_chains_and_outcomes_equals_each_alone() -> None:
    def items(draft: DraftEngine, names: str) -> list[object]:
        current = {name: session(COUPLED, request_id=name) for name in "abcd"}
        asked = {
            "a": replace(speculate_item(current["a"], 3), tree=TreeBudget(12)),
            "b": speculate_item(current["b"], 4),
            "c": speculate_item(current["c"], 2, proposed=(1, 2), fanout=(2, 0, 2)),
            "d": replace(speculate_item(current["d"], 4), tree=TreeBudget.of_widths((2, 2))),
        }
        replies = draft.speculate([asked[name] for name in names]).replies
        draft.check_integrity()
        return list(replies)

    alone = [items(toy_draft()[0], name)[0] for name in "abcd"]
    assert items(toy_draft()[0], "abcd") == alone
    assert items(toy_draft(max_num_batched_tokens=5)[0], "abcd") == alone


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_spine_stays_computed_and_what_follows_another_branch_is_right(sampling: SamplingParams) -> None:
    draft, runner = toy_draft()
    current = session(sampling)
    tree = propose_tree(draft, current, 3, TreeBudget.of_widths((2, 2, 2)))
    paths = sorted(paths_of(tree), key=len)
    spine = tree.first_chain().token_ids
    others = [path for path in paths if len(path) == 3 and path[0] != spine[0]]
    for path in (spine, others[0]):
        follower, runner = toy_draft()
        here = Session("a", list(PROMPT), sampling)
        propose_tree(follower, here, 3, TreeBudget.of_widths((2, 2, 2)))
        before = runner.num_rows
        here.token_ids += [*path, 7]
        again = propose_tree(follower, here, 1, TreeBudget(5))
        fresh = propose_tree(toy_draft()[0], Session("a", list(here.token_ids), sampling), 1, TreeBudget(5))
        assert again == fresh
        # The last token of a path was never computed, nor was the verdict's own.
        assert runner.num_rows - before == (2 if path == spine else 4)
        follower.check_integrity()


def test_tree_without_room_has_fewer_branches() -> None:
    # Blocks of 4 tokens: the prompt and two more fill three, and there are no others.
    draft, _ = toy_draft(num_blocks=4)
    tree = propose_tree(draft, session(), 3, TreeBudget(40))
    chain = propose(toy_draft()[0], session(), 3)
    assert tree.first_chain() == chain
    assert 3 < len(tree) < len(propose_tree(toy_draft()[0], session(), 3, TreeBudget(40)))
    assert max(tree.depths) == 2
    assert_all_free(draft)


def test_more_rows_than_a_mask_can_tell_are_not_computed() -> None:
    draft, runner = toy_draft(torch.zeros(NUM_ROWS, VOCAB_SIZE))
    tree = propose_tree(draft, session(COUPLED), 4, TreeBudget(64))
    assert len(tree) == 64
    assert max(row.kv_index for step in runner.steps for item in step for row in item.visibility) < (
        len(PROMPT) + 64
    )
    draft.check_integrity()


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ((0,), r"tree.num_nodes is 0; allowed: 1\.\.64"),
        ((65,), r"tree.num_nodes is 65; allowed: 1\.\.64"),
        ((4, (2, 0)), r"tree.widths is \(2, 0\); allowed: numbers of 1 or more"),
        ((4, (), 1.0), "tree.min_chance is 1.0; allowed: 0 or more, below 1"),
    ],
)
def test_budget_out_of_range_is_refused(tree: tuple[object, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        TreeBudget(*tree)  # type: ignore[arg-type]


def test_budget_of_a_shape_counts_its_nodes() -> None:
    assert TreeBudget.of_widths((4, 2, 1)) == TreeBudget(20, (4, 2, 1))
    with pytest.raises(ValueError, match=r"tree.num_nodes is 72; allowed: 1\.\.64"):
        TreeBudget.of_widths((8, 8))
