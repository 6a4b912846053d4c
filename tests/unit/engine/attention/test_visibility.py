"""What a row sees, from its mask and from its tree."""

from collections.abc import Sequence

import pytest
import torch

from specray.engine.visibility import (
    Visibility,
    branch_visibility,
    count_bits,
    is_visible,
    tree_visibility,
    within_window,
)
from tests.unit.engine.attention.trees import TREES, Tree, chains_and_branches

MASKS = (1, 2, 3, 1 << 63, (1 << 64) - 1, 0x8000000000000001, 0x5555555555555555, 0xAAAAAAAAAAAAAAAA, 1 << 62)


def signed(mask: int) -> int:
    return Visibility(0, 0, mask).signed_ancestors


def columns(rows: Sequence[Visibility]) -> tuple[torch.Tensor, ...]:
    table = [(row.prefix_len, row.first_index, row.signed_ancestors) for row in rows]
    return torch.tensor(table).unbind(1)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_position_and_index_are_those_of_the_node(tree: Tree) -> None:
    rows = tree.visibility()
    assert [row.position for row in rows] == tree.positions[tree.first :]
    assert [row.kv_index for row in rows] == list(range(tree.first, tree.first + len(rows)))


@pytest.mark.parametrize("window", [None, 1, 2, 7, 63, 64, 200])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_the_dense_form_is_what_the_walk_to_the_root_gives(tree: Tree, window: int | None) -> None:
    tree = Tree(tree.prefix_len, tree.parents, window)
    keys = torch.arange(tree.prefix_len + 70)
    dense = is_visible(keys, *columns(tree.visibility()), window)
    for node, seen in enumerate(dense):
        assert seen.nonzero()[:, 0].tolist() == tree.seen(node)


def test_rows_of_branches_see_their_prefix_and_their_own() -> None:
    rows = chains_and_branches()
    assert [row.position for row in rows] == [5, 6, 7, 9]
    assert [row.kv_index for row in rows] == [9, 10, 12, 13]
    dense = is_visible(torch.arange(16), *columns(rows), None)
    assert [row.nonzero()[:, 0].tolist() for row in dense] == [
        [0, 1, 2, 3, 4, 9],
        [0, 1, 2, 3, 4, 9, 10],
        [*range(7), 12],
        [*range(9), 13],
    ]


def test_bits_are_counted_with_the_sign_bit() -> None:
    counts = count_bits(torch.tensor([signed(mask) for mask in MASKS]))
    assert counts.tolist() == [mask.bit_count() for mask in MASKS]


@pytest.mark.parametrize("window", [1, 2, 5, 31, 63])
def test_a_window_keeps_the_highest_bits(window: int) -> None:
    kept = within_window(torch.tensor([signed(mask) for mask in MASKS]), window)
    for mask, left in zip(MASKS, kept.tolist(), strict=True):
        bits = [bit for bit in range(64) if mask >> bit & 1][-window:]
        assert Visibility.from_signed(0, 0, left).ancestors == sum(1 << bit for bit in bits)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_survives_as_int64(mask: int) -> None:
    row = Visibility(3, 4, mask)
    assert -(1 << 63) <= row.signed_ancestors < 1 << 63
    assert Visibility.from_signed(3, 4, row.signed_ancestors) == row


def test_more_rows_than_a_mask_has_bits_are_refused() -> None:
    with pytest.raises(AssertionError):
        branch_visibility(3, 4, 65)
    with pytest.raises(AssertionError):
        tree_visibility(3, [-1] * 65)
    with pytest.raises(AssertionError):
        tree_visibility(3, [-1, 1])
