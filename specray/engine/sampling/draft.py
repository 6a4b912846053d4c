"""How the draft draws its tokens, and how it ranks what the target may draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.engine.sampling.processors import RowGroup, process_logits
from specray.engine.sampling.verify import draw_coupled
from specray.types import SamplingParams, SparseProbs, Verification


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
        scores = self._scores(processed, groups, rejection_purpose=None)
        chosen = scores.argmax(-1).tolist()
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
            logits: unprocessed, ``[len(groups), vocab_size]``.
            groups: one row each.
            counts: most tokens wanted per row.
            excluded: a token per row that cannot come (the rejected draft token), or None.
        """
        processed = process_logits(logits, groups)
        scores = self._scores(processed, groups, rejection_purpose=Purpose.RESIDUAL_DRAW)
        width = min(scores.shape[1], max(counts) + 1)
        values, token_ids = scores.topk(width, dim=-1)
        ranked = []
        for row_values, row, count, skip in zip(
            values.tolist(), token_ids.tolist(), counts, excluded, strict=True
        ):
            possible = [
                token
                for value, token in zip(row_values, row, strict=True)
                if token != skip and value > -math.inf
            ]
            ranked.append(possible[:count])
        return ranked

    def _scores(
        self, processed: Tensor, groups: Sequence[RowGroup], *, rejection_purpose: Purpose | None
    ) -> Tensor:
        """Processed logits plus the noise of each row's rule; greedy rows have none.

        Args:
            rejection_purpose: noise for rows under rejection verification; None leaves them without.
        """
        keys = [_score_key(group, rejection_purpose) for group in groups]
        rows = [row for row, key in enumerate(keys) if key is not None]
        if not rows:
            return processed
        noise = self._noise.gumbel([key for key in keys if key is not None])
        if len(rows) == len(keys):
            return processed + noise
        scores = processed.double()
        scores[rows] += noise
        return scores

    def _draw_truncated(self, processed: Tensor, group: RowGroup) -> DraftToken:
        """Samples the likeliest tokens' renormalised distribution, rounded to the float32 that travels."""
        size = min(len(processed), self._max_num_draft_probs)
        values, token_ids = processed.topk(size)
        probs = values.softmax(-1, dtype=torch.float32)
        is_possible = probs > 0.0
        probs, token_ids = probs[is_possible], token_ids[is_possible]
        key = NoiseKey(group.sampling.seed, group.first_position, Purpose.DRAFT_DRAW)
        noise = self._noise.gumbel([key])[:, token_ids]
        choice = int(draw_coupled(probs.double().log()[None], noise))
        support = tuple(token_ids.tolist())
        return DraftToken(support[choice], SparseProbs(support, tuple(probs.tolist())))


def draws_by_rejection(sampling: SamplingParams) -> bool:
    """True when draft tokens are samples that travel with their distribution."""
    return sampling.verification is Verification.REJECTION and not sampling.is_greedy


def _score_key(group: RowGroup, rejection_purpose: Purpose | None) -> NoiseKey | None:
    sampling = group.sampling
    if sampling.is_greedy:
        return None
    purpose = rejection_purpose if draws_by_rejection(sampling) else Purpose.COUPLED_DRAW
    return None if purpose is None else NoiseKey(sampling.seed, group.first_position, purpose)
