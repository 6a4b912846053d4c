"""Acceptance by depth on text that the target has written: what greedy verification would have accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_RANKS = 8
"""Ranks of a head's tokens that are counted apart."""


@dataclass(slots=True)
class DepthCounts:
    """Anchors at one depth."""

    num_reached: int = 0
    """Anchors whose earlier draft tokens were all right, and whose text is the target's most likely one."""
    num_accepted: int = 0
    """Rows whose draft token at this depth is right, too."""

    def add(self, other: DepthCounts) -> None:
        self.num_reached += other.num_reached
        self.num_accepted += other.num_accepted

    @property
    def rate(self) -> float:
        """Share of accepted draft tokens; 0 where there are none."""
        return self.num_accepted / self.num_reached if self.num_reached else 0.0


def count_accepted(
    hits: Sequence[torch.Tensor], follows: torch.Tensor, is_counted: torch.Tensor
) -> list[DepthCounts]:
    """Counts of each depth, given that all earlier ones agree.

    Args:
        hits: of each depth s, ``[num_rows, num_anchors]``: the head's most likely token at place q + 2 + s is
            the target's.
        follows: ``[num_rows, length]``: the text's token is the target's most likely one. Where it is not, a
            greedy target would have gone on otherwise, and later depths have nothing to be compared with.
        is_counted: ``[num_rows, length]``: tokens that a server would be asked for.
    """
    counts = []
    reached = is_counted[:, 2:]
    for depth, hit in enumerate(hits):
        reached = reached[:, : hit.shape[1]]
        accepted = reached & hit
        counts.append(DepthCounts(int(reached.sum()), int(accepted.sum())))
        place = 2 + depth
        is_next = is_counted[:, place + 1 :]
        reached = (accepted & follows[:, place : place + hit.shape[1]])[:, : is_next.shape[1]] & is_next
    return counts


def count_ranks(
    logits: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], is_counted: Sequence[torch.Tensor]
) -> torch.Tensor:
    """How often the target's token has each rank among a head's, ``[num_depths, NUM_RANKS + 1]``.

    Args:
        logits: of each depth, ``[..., num_columns]``.
        columns: of each depth, the column of the target's most likely token; -1: there is none.
        is_counted: of each depth, the places that count.

    Returns:
        Counts by depth and rank; the last of a row is of all further ranks.
    """
    counts = []
    for rows, column, counted in zip(logits, columns, is_counted, strict=True):
        own = rows.gather(-1, column.clamp(min=0)[..., None])
        ranks = (rows > own).sum(-1).clamp(max=NUM_RANKS)
        ranks = torch.where(column < 0, NUM_RANKS, ranks)
        counts.append(torch.bincount(ranks[counted], minlength=NUM_RANKS + 1))
    return torch.stack(counts)


def rank_rates(counts: torch.Tensor) -> list[list[float]]:
    """Chances by depth and rank; a rank that was never seen counts as half of a place."""
    seen = counts.clamp(min=0.5)
    return [[round(rate, 5) for rate in row] for row in (seen[:, :-1] / seen.sum(-1, keepdim=True)).tolist()]


def places_of(follows: torch.Tensor, is_counted: torch.Tensor, num_depths: int) -> list[torch.Tensor]:
    """Anchors of each depth after which a greedy target would have gone on as the text did.

    Args:
        follows, is_counted: as ``count_accepted`` takes them.
    """
    found, going = [], is_counted[:, 2:]
    for depth in range(num_depths):
        found.append(going)
        place = 2 + depth
        going = (going & follows[:, place : place + going.shape[1]])[:, :-1] & is_counted[:, place + 1 :]
    return found


def tokens_per_round(counts: Sequence[DepthCounts]) -> float:
    """Expected tokens of a greedy round with a chain over all depths, the target's own token included."""
    expected, chance = 1.0, 1.0
    for each in counts:
        chance *= each.rate
        expected += chance
    return expected
