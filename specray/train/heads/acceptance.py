"""Acceptance by depth on text that the target has written: what greedy verification would have kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class DepthCounts:
    """Anchors at one depth."""

    num_reached: int = 0
    """Anchors whose earlier draft tokens were all right, and whose text is the target's most likely one."""
    num_accepted: int = 0
    """Those whose draft token at this depth is right, too."""

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


def tokens_per_round(counts: Sequence[DepthCounts]) -> float:
    """Expected tokens of a greedy round with a chain over all depths, the target's own token included."""
    expected, chance = 1.0, 1.0
    for each in counts:
        chance *= each.rate
        expected += chance
    return expected
