"""Rows of a tree: each is what the last row of the chain that leads to its node would be."""

from __future__ import annotations

import random

import pytest
import torch

from specray.draft_tokens import DraftTokens
from specray.engine.sampling.noise import NoiseSource, Purpose
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.state import SamplingState, chain_rows, draft_rows
from specray.engine.sampling.verify import Round, Verified, draw_keys, verify_rounds
from specray.types import SamplingParams
from tests.unit.engine.sampling.device.cases import random_group, random_logits

VOCAB_SIZE = 12
TREE = DraftTokens((3, 5, 1, 3, 4), (-1, -1, 0, 1, 3))


@pytest.mark.parametrize("seed", range(60))
def test_each_row_is_processed_and_drawn_as_behind_its_own_path(seed: int) -> None:
    rng = random.Random(seed)
    group = random_group(rng, VOCAB_SIZE, rng.randint(0, 9))
    logits = random_logits(rng, group.num_rows, VOCAB_SIZE)
    processed, keys = process_logits(logits, [group]), draw_keys(group)
    of_rejection = None if group.parents is None else Purpose.RESIDUAL_DRAW
    for row in range(group.num_rows):
        state = group.state.fork()
        state.advance([group.token_ids[index] for index in group.path(row)])
        masks = None if group.token_masks is None else group.token_masks[row : row + 1]
        alone = chain_rows(state, token_masks=masks)
        assert torch.equal(processed[row : row + 1], process_logits(logits[row : row + 1], [alone])), row
        assert keys[row : row + 1] == draw_keys(alone, of_rejection)


def rows_with_argmax(*token_ids: int) -> torch.Tensor:
    logits = torch.zeros(len(token_ids), VOCAB_SIZE)
    logits[range(len(token_ids)), list(token_ids)] = 9.0
    return logits


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((5, 0, 3, 0, 4, 7), Verified(3, 7, 4)),  # the second child, and on to the leaf
        ((5, 1, 6, 0, 0, 0), Verified(1, 6, 1)),  # its child is not the target's own
        ((3, 1, 0, 8, 0, 0), Verified(2, 8, 2)),  # the first child and its own
        ((6, 1, 3, 0, 4, 0), Verified(0, 6)),  # no child: right tokens below it count for nothing
    ],
)
def test_the_walk_goes_to_the_child_that_is_the_targets_own(own: tuple[int, ...], expected: Verified) -> None:
    group = draft_rows(SamplingState(SamplingParams(temperature=0.0), (0, 0)), TREE)
    item = Round(group, TREE.token_ids, ())
    assert verify_rounds(rows_with_argmax(*own), [item], NoiseSource(VOCAB_SIZE)) == [expected]


def test_nodes_of_one_depth_share_the_noise_of_their_position() -> None:
    """Of equal logits, rows of one depth so draw the same token, and others draw others."""
    sampling = SamplingParams(seed=3)
    group = draft_rows(SamplingState(sampling, (0, 0)), TREE)
    assert list(group.positions) == [2, 3, 3, 4, 4, 5]
    keys = draw_keys(group)
    assert keys[1] == keys[2] != keys[3] == keys[4] != keys[5]
    draws = NoiseSource(VOCAB_SIZE).gumbel([key for key in keys if key is not None]).argmax(-1).tolist()
    assert draws[1] == draws[2] and draws[3] == draws[4]
