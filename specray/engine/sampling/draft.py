"""How the draft draws its tokens, and how it ranks what the target may draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.engine.sampling.processors import RowGroup, cuts_tail, process_logits, without_tail_cut
from specray.engine.sampling.verify import add_draw_noise, draws_by_rejection
from specray.types import SparseProbs

_DEMOTION = 1e6
"""More than logits and noise differ: every token of the nucleus ranks before every other."""


class DraftToken(NamedTuple):
    """A draft token and, under rejection verification, the distribution from which it was drawn."""

    token_id: int
    probs: SparseProbs | None


class DraftSampler:
    """Draws draft tokens by each request's verification rule.

    Args:
        noise: of the draft's vocabulary and device.
        max_num_draft_probs: support of the truncated distribution under rejection verification.
    """

    def __init__(self, noise: NoiseSource, *, max_num_draft_probs: int = 64) -> None:
        self._noise = noise
        self._max_num_draft_probs = max_num_draft_probs

    def draw(self, logits: Tensor, groups: Sequence[RowGroup]) -> list[DraftToken]:
        """One draft token per row.

        Args:
            logits: unprocessed, ``[len(groups), vocab_size]``.
            groups: one row each.
        """
        processed = process_logits(logits, groups)
        chosen = add_draw_noise(processed, groups, self._noise).argmax(-1).tolist()
        return [
            self._draw_truncated(row, group)
            if draws_by_rejection(group.sampling)
            else DraftToken(token, None)
            for row, group, token in zip(processed, groups, chosen, strict=True)
        ]

    def rank(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        counts: Sequence[int],
        excluded: Sequence[int | None],
    ) -> list[list[int]]:
        """The tokens that the target is likeliest to draw at each row, best first.

        Under coupled verification the ranking uses the target's own noise, under rejection verification that
        of its residual draw; neither decides whether a draft token is accepted.

        Args:
            logits: unprocessed, ``[sum of num_rows, vocab_size]``.
            counts: most tokens wanted, per row.
            excluded: a token per row that cannot come (the rejected draft token), or None.
        """
        scores = add_draw_noise(
            _rankable(logits, groups), groups, self._noise, rejection_purpose=Purpose.RESIDUAL_DRAW
        )
        values, token_ids = scores.topk(min(scores.shape[1], max(counts) + 1), dim=-1)
        rows = zip(values.tolist(), token_ids.tolist(), counts, excluded, strict=True)
        return [
            [
                token
                for value, token in zip(row_values, row, strict=True)
                if token != skip and value > -math.inf
            ][:count]
            for row_values, row, count, skip in rows
        ]

    def _draw_truncated(self, processed: Tensor, group: RowGroup) -> DraftToken:
        """Samples the likeliest tokens' renormalised distribution, rounded to the float32 that travels."""
        size = min(len(processed), self._max_num_draft_probs)
        values, token_ids = processed.topk(size)
        probs = values.softmax(-1, dtype=torch.float32)
        is_possible = probs > 0.0
        probs, token_ids = probs[is_possible], token_ids[is_possible]
        key = NoiseKey(group.sampling.seed, group.first_position, Purpose.DRAFT_DRAW)
        gumbel = self._noise.gumbel([key])[0, token_ids]
        choice = int((probs.double().log() + gumbel).argmax())
        support = tuple(token_ids.tolist())
        return DraftToken(support[choice], SparseProbs(support, tuple(probs.tolist())))


def _rankable(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Processed logits in which the tail is demoted, not impossible.

    The target cuts its own tail, elsewhere: where the draft's leaves the rejected token alone, its next ones
    are still the best guesses.
    """
    processed = process_logits(logits, groups)
    if not any(cuts_tail(group.sampling) for group in groups):
        return processed
    uncut = process_logits(logits, [without_tail_cut(group) for group in groups])
    return torch.where(processed == -math.inf, uncut - _DEMOTION, uncut)
