"""Tries of continuations: what becomes a branch, in which order, and the chain that is always in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.draft_tokens import DraftTokens
from specray.drafting import NgramProposer, OutputStore, SessionProposer, SuffixProposer
from specray.drafting.trie import grow

TOKENS = st.lists(st.integers(0, 3), max_size=60)


class Scripted:
    """An expert of a given tree: {token: (share, further tokens)}."""

    def __init__(self, tree: dict[int, tuple[float, dict]], weight: float = 1.0) -> None:
        self.weight = weight
        self._tree = tree

    def next(self) -> list[tuple[int, Scripted]]:
        return [(token, Scripted(rest, self.weight * share)) for token, (share, rest) in self._tree.items()]


def tree_of(proposer: SessionProposer, tokens: Sequence[int], k: int, num_nodes: int) -> DraftTokens:
    proposer.extend(tokens)
    return proposer.propose(k, num_nodes)


def test_nodes_come_by_weight_behind_the_chain() -> None:
    expert = Scripted({1: (0.5, {3: (0.4, {}), 4: (0.3, {})}), 2: (0.3, {5: (0.9, {6: (0.9, {})})})})
    # Weights: 1 0.5, 3 0.2, 4 0.15; 2 0.3, 5 0.27, 6 0.243.
    for num_nodes, tokens, parents in (
        (3, (1, 3, 2), (-1, 0, -1)),
        (5, (1, 3, 2, 5, 6), (-1, 0, -1, 2, 3)),
        (9, (1, 3, 2, 5, 6, 4), (-1, 0, -1, 2, 3, 0)),
    ):
        assert grow((1, 3), [expert], num_nodes=num_nodes, depth=3) == DraftTokens(tokens, parents)
    # A path is no longer than the depth.
    assert grow((1, 3), [expert], num_nodes=9, depth=2) == DraftTokens((1, 3, 2, 5, 4), (-1, 0, -1, 2, 0))


def test_experts_that_agree_share_a_node() -> None:
    first, second = Scripted({7: (1.0, {8: (0.5, {})})}, 0.3), Scripted({7: (1.0, {9: (1.0, {})})}, 0.3)
    third = Scripted({5: (1.0, {})}, 0.4)
    # 7 has 0.6 together, 9 and 8 what their own experts leave them.
    tree = grow((5,), [first, second, third], num_nodes=4, depth=2)
    assert tree == DraftTokens((5, 7, 9, 8), (-1, -1, 1, 1))


def test_unlikely_nodes_are_left_out() -> None:
    expert = Scripted({1: (0.9, {}), 2: (0.011, {}), 3: (0.009, {})})
    assert grow((1,), [expert], num_nodes=64, depth=1) == DraftTokens((1, 2), (-1, -1))


def test_occurrences_that_go_on_differently_become_branches() -> None:
    # After 1 2 came 7, then 8, then 9: the latest is the chain; of the others the later goes first.
    tokens = [1, 2, 7, 4, 1, 2, 8, 5, 1, 2, 9, 6, 1, 2]
    tree = tree_of(NgramProposer(), tokens, 2, 6)
    assert tree == DraftTokens((9, 6, 8, 7, 5, 4), (-1, 0, -1, -1, 2, 3))
    # A longer match counts more than a later one.
    tokens = [3, 1, 2, 7, 4, 1, 2, 8, 3, 1, 2]
    assert tree_of(NgramProposer(), tokens, 1, 2) == DraftTokens((7, 8), (-1, -1))


def test_one_continuation_stays_a_chain() -> None:
    tokens = [1, 2, 7, 4, 5, 6, 1, 2]
    assert tree_of(NgramProposer(), tokens, 3, 16) == DraftTokens((7, 4, 5))
    assert tree_of(SuffixProposer(), tokens, 2, 16) == DraftTokens((7, 4))


def test_suffix_branches_by_how_often_tokens_followed() -> None:
    # After 1 2 came 7 twice, 8 once; all that follows is followed for as long as the match.
    tokens = [1, 2, 7, 5, 1, 2, 8, 4, 1, 2, 7, 3, 1, 2]
    tree = tree_of(SuffixProposer(min_prob=0.3), tokens, 4, 3)
    assert tree.first_chain().token_ids == (7,)
    assert tree == DraftTokens((7, 8, 4), (-1, -1, 1))


def test_past_outputs_are_branches_too() -> None:
    store = OutputStore(100)
    store.add([5, 6, 7, 8])
    store.add([5, 6, 9, 1])
    tree = tree_of(SuffixProposer(store=store), [1, 5, 6], 2, 4)
    assert tree == DraftTokens((9, 1, 7, 8), (-1, 0, -1, 2))


@pytest.mark.parametrize("kind", ["ngram", "suffix", "past"])
@given(tokens=TOKENS, past=TOKENS, k=st.integers(0, 8), num_nodes=st.integers(0, 24))
def test_any_tree_contains_the_chain_and_keeps_its_bounds(
    kind: str, tokens: list[int], past: list[int], k: int, num_nodes: int
) -> None:
    def proposer() -> SessionProposer:
        if kind == "ngram":
            return NgramProposer()
        if kind == "suffix":
            return SuffixProposer()
        store = OutputStore(200)
        store.add(past)
        return SuffixProposer(store=store)

    chain = tree_of(proposer(), tokens, k, 0)
    tree = tree_of(proposer(), tokens, k, num_nodes)
    assert chain.is_chain
    assert tree.first_chain() == chain
    assert len(chain) <= len(tree) <= max(num_nodes, len(chain))
    assert max(tree.depths, default=0) < max(1, k)
    parents = tree.parents or range(-1, len(tree) - 1)
    siblings = list(zip(parents, tree.token_ids, strict=True))
    assert len(siblings) == len(set(siblings)), "siblings differ"
    # All of a larger tree begins with the smaller one.
    smaller = tree_of(proposer(), tokens, k, max(0, num_nodes - 1))
    assert tree.first(len(smaller)) == smaller
