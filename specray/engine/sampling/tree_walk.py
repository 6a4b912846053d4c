"""Walks down trees of draft tokens, drawing only from the rows that the walk comes to.

Drawing from a row takes as long as the vocabulary is large, and a walk comes to few rows of a tree. All trees
of a step go down one level at a time, so that a level is one draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specray.engine.sampling.draws import draw_tokens
from specray.engine.sampling.noise import NoiseSource, Purpose
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.state import RowGroup, SamplingState
from specray.engine.sampling.verify import Verified, draw_keys


class _TreePlace(NamedTuple):
    """A node that a walk has come to: the target's own token follows it."""

    tree: int
    """Index of its tree."""
    node: int
    """Index of the node; -1: the root."""
    row: int
    """Row of logits."""
    group: RowGroup
    """That row alone."""


def walk_trees(
    logits: Tensor, groups: Sequence[RowGroup], first_rows: Sequence[int], noise: NoiseSource
) -> list[Verified]:
    """What ``verify.accept_own`` says of the target's own tokens in all rows.

    Args:
        logits: unprocessed, ``[num_rows, vocab_size]``; left unchanged.
        groups: of trees.
        first_rows: of each, the row of its root.
    """
    verified: list[Verified] = [Verified(0, 0)] * len(groups)
    places = [
        _TreePlace(tree, -1, row, _single(group, group.state, 0))
        for tree, (group, row) in enumerate(zip(groups, first_rows, strict=True))
    ]
    depth = 0
    while places:
        singles = [place.group for place in places]
        processed = process_logits(logits[[place.row for place in places]], singles)
        keys = [key for single in singles for key in draw_keys(single, Purpose.RESIDUAL_DRAW)]
        draws = draw_tokens(processed, keys, noise)
        before, places = places, []
        # The first place of a tree, of several with equal tokens, is where it ends if no walk goes on.
        for place, draw in reversed(list(zip(before, draws, strict=True))):
            last = None if place.node < 0 else place.node
            verified[place.tree] = Verified(depth, draw.token_id, last)
        for place, draw in zip(before, draws, strict=True):
            places += _children(place, groups[place.tree], first_rows[place.tree], draw.token_id)
        places.sort(key=lambda place: (place.tree, place.node))
        depth += 1
    return verified


def _children(place: _TreePlace, group: RowGroup, first_row: int, token_id: int) -> list[_TreePlace]:
    assert group.parents is not None, "only trees are walked down"
    nodes = [
        node
        for node, (parent, child) in enumerate(zip(group.parents, group.token_ids, strict=True))
        if parent == place.node and child == token_id
    ]
    if not nodes:
        return []
    state = place.group.state.fork()
    state.advance((token_id,))
    return [
        _TreePlace(place.tree, node, first_row + node + 1, _single(group, state, node + 1)) for node in nodes
    ]


def _single(group: RowGroup, state: SamplingState, row: int) -> RowGroup:
    masks = None if group.token_masks is None else group.token_masks[row : row + 1]
    return RowGroup(group.sampling, state, (), (group.positions[row],), masks)
