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
