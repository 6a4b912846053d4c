"""The shared values: draft tokens as a chain or a tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.draft_tokens import MAX_DRAFT_NODES, NO_DRAFT, DraftTokens, SparseProbs

#     root
#     /  \
#   10    11
#   /    /  \
#  12   13   14
#            |
#            15
TREE = DraftTokens((10, 11, 12, 13, 14, 15), (-1, -1, 0, 1, 1, 4))


@st.composite
def trees(draw: st.DrawFn) -> DraftTokens:
    """Each token is its node's index, so that it can be found again."""
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(-1, index - 1)) for index in range(size))
    probs = tuple(SparseProbs((index,), (1.0,)) for index in range(size))
    return DraftTokens(tuple(range(size)), parents, draw(st.sampled_from(((), probs))))


def test_parents_of_a_chain_are_dropped() -> None:
    assert DraftTokens((7, 8, 9), (-1, 0, 1)) == DraftTokens((7, 8, 9))
    assert DraftTokens((), ()) == NO_DRAFT
    assert DraftTokens((7, 8, 9), (-1, 0, 1)).is_chain
    assert not TREE.is_chain


def test_depth_of_a_node_is_its_distance_from_the_root() -> None:
    assert TREE.depths == (0, 0, 1, 1, 1, 2)
    assert DraftTokens((7, 8, 9)).depths == (0, 1, 2)
    assert NO_DRAFT.depths == ()


def test_first_chain_takes_the_first_child_of_every_node() -> None:
    assert TREE.first_chain() == DraftTokens((10, 12))
    assert DraftTokens((1, 2, 3), (-1, -1, -1)).first_chain() == DraftTokens((1,))
    chain = DraftTokens((7, 8))
    assert chain.first_chain() is chain


def test_first_nodes_are_a_tree_again() -> None:
    assert TREE.first(4) == DraftTokens((10, 11, 12, 13), (-1, -1, 0, 1))
    assert TREE.first(1) == DraftTokens((10,))
    assert TREE.first(0) == NO_DRAFT
    assert TREE.first(7) is TREE


def test_path_leads_from_the_root_to_a_node() -> None:
    assert TREE.path(5) == (1, 4, 5)
    assert TREE.path(0) == (0,)
    assert TREE.path(-1) == ()
    assert DraftTokens((7, 8, 9)).path(1) == (0, 1)


def test_depth_of_a_tree_is_that_of_its_longest_path() -> None:
    assert (TREE.depth, DraftTokens((7, 8, 9)).depth, NO_DRAFT.depth) == (3, 3, 0)


@pytest.mark.parametrize(
    ("right", "node"),
    [((11, 14, 15, 9), 5), ((11, 14, 9), 4), ((11, 12), 1), ((10, 12, 9), 2), ((12,), -1), ((), -1)],
)
def test_a_walk_follows_the_right_tokens_from_the_root(right: tuple[int, ...], node: int) -> None:
    own = {TREE.path(at): token for at in range(-1, 6) for token in right[len(TREE.path(at)) :][:1]}
    assert TREE.walk(lambda at: own.get(TREE.path(at), -1)) == node
    assert TREE.common(right) == node


def test_a_walk_over_equal_siblings_finds_the_longest_path() -> None:
    tree = DraftTokens((7, 7, 8, 8, 9), (-1, -1, 0, 1, 3))
    assert tree.common((7, 8, 9)) == 4
    assert tree.common((7, 9)) == 0


def test_nodes_within_a_depth_keep_their_parents() -> None:
    assert TREE.within(2) == DraftTokens((10, 11, 12, 13, 14), (-1, -1, 0, 1, 1))
    assert TREE.within(1) == DraftTokens((10, 11), (-1, -1))
    assert TREE.within(0) == NO_DRAFT
    assert TREE.within(3) is TREE
    assert DraftTokens((7, 8, 9)).within(2) == DraftTokens((7, 8))


def test_what_follows_a_dropped_node_is_dropped() -> None:
    assert TREE.without([False, True, False, False, False, False]) == DraftTokens((10, 12))
    assert TREE.without([False] * 4 + [True, False]) == DraftTokens((10, 11, 12, 13), (-1, -1, 0, 1))
    assert TREE.without([True] * 6) == NO_DRAFT


@pytest.mark.slow
@given(trees(), st.data())
def test_nodes_that_are_left_keep_their_paths(tree: DraftTokens, data: st.DataObject) -> None:
    is_dropped = data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree)))
    left = tree.without(is_dropped)
    kept = [node for node in range(len(tree)) if not any(is_dropped[each] for each in tree.path(node))]
    assert list(left.token_ids) == kept
    for place, node in enumerate(kept):
        assert [left.token_ids[each] for each in left.path(place)] == list(tree.path(node))


@given(trees())
def test_first_chain_follows_parents_and_leaves_out_no_first_child(tree: DraftTokens) -> None:
    chain = tree.first_chain()
    parents = tree.parents or tuple(range(-1, len(tree) - 1))
    assert chain.is_chain
    for parent, node in zip((-1, *chain.token_ids), chain.token_ids, strict=False):
        assert parents.index(parent) == node
    assert not chain.token_ids or chain.token_ids[-1] not in parents
    if tree.probs:
        assert [row.token_ids for row in chain.probs] == [(node,) for node in chain.token_ids]


@pytest.mark.slow
@given(trees(), st.integers(0, 14))
def test_first_nodes_keep_their_parents(tree: DraftTokens, num_nodes: int) -> None:
    cut = tree.first(num_nodes)
    assert len(cut) == min(num_nodes, len(tree))
    assert cut.depths == tree.depths[:num_nodes]
    assert cut.probs == tree.probs[:num_nodes]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": (1,) * (MAX_DRAFT_NODES + 1)}, "draft.token_ids has 65 entries; allowed: at most 64"),
        ({"token_ids": (1, 2), "parents": (-1,)}, "draft.parents has 1 entries for 2 draft tokens"),
        ({"token_ids": (1,), "parents": (0,)}, r"draft.parents\[0\] is 0; allowed: -1..-1"),
        ({"token_ids": (1, 2), "parents": (-1, -2)}, r"draft.parents\[1\] is -2; allowed: -1..0"),
        ({"token_ids": (1, 2), "parents": (-1, 1)}, r"draft.parents\[1\] is 1; allowed: -1..0"),
        ({"probs": (SparseProbs((1,), (1.0,)),)}, "draft.probs has 1 entries for 0 draft tokens"),
    ],
)
def test_invalid_draft_tokens_are_refused_by_name(fields: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DraftTokens(**fields)  # type: ignore[arg-type]
