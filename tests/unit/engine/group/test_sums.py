"""Three ranks sum in their order, so that a row's bits do not depend on the other rows."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

import torch

from tests.unit.engine.group.group_ranks import answers_of_ranks, join

NUM_RANKS = 3
WIDTHS = (1, 7, 33)
SIZE = 5


def part(rank: int, num_rows: int) -> torch.Tensor:
    """A rank's numbers, so unlike in size that a sum's order shows; a row is the same among any others."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(WIDTHS[-1], SIZE, generator=generator) * 10.0 ** (3 * (rank - 1))
    return numbers[:num_rows].clone()


def sum_rows(rank: int, meeting: Queue[str], answers: Queue[Any]) -> None:
    group = join(rank, meeting, world_size=NUM_RANKS)
    sums = [group.all_reduce(part(rank, num_rows)).tolist() for num_rows in WIDTHS]
    answers.put((rank, sums))
    group.close()


def test_three_ranks_sum_every_row_in_their_order_whatever_else_is_there() -> None:
    answers = dict(answers_of_ranks(sum_rows, count=NUM_RANKS, num_ranks=NUM_RANKS))
    first, second, third = (part(rank, WIDTHS[-1]) for rank in range(NUM_RANKS))
    expected = (first + second) + third
    others = first + (second + third)
    assert not torch.equal(expected, others), "the order shows"
    for sums in answers.values():
        assert sums == [expected[:num_rows].tolist() for num_rows in WIDTHS]
