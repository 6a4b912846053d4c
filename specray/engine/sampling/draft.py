"""Draws draft tokens, and ranks the tokens that the target may draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.draws import SCORE_SPREAD, draw_tokens, draw_weighted
from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.engine.sampling.processors import (
    cuts_tail,
    process_logits,
    shifts_logits,
    without_tail_cut,
)
from specray.engine.sampling.state import RowGroup
from specray.engine.sampling.verify import add_draw_noise, draw_keys
from specray.engine.sampling.vocabulary import TrimmedVocabulary

_MIN_RANKED = 8
"""Alternatives per row, at least, from which a draft token's acceptance is estimated."""
UNLIKELY = -20.0
"""Log probability of a token that is not among the ranked ones."""
_REJECTION_ACCEPTANCE = 0.7
"""Estimated acceptance of a draft token under rejection; each next token gets half of the remainder."""
DEMOTION = 1e6
"""Penalty on tokens outside the nucleus, larger than any difference of logits and noise."""


class DraftToken(NamedTuple):
    """A draft token and, under rejection verification, the distribution from which it was drawn."""

    token_id: int
    probs: SparseProbs | None
    logprob: float = 0.0
    """Log probability of acceptance, where it was asked for and may decide what is proposed."""


class RankedRow(NamedTuple):
    """What the target may draw at one row, by the draft's judgement."""

    next_tokens: list[tuple[int, float]]
    """Pairs (token id, log probability), likeliest first, without the excluded token."""
    excluded_logprob: float
    """Log probability that the excluded token is accepted."""


class DraftSampler:
    """Draws draft tokens by each request's verification rule.

    Args:
        noise: of the draft's vocabulary and device: of a trimmed one's token ids alone, of a padded one's
            first ids without the padding.
        max_num_draft_probs: support of the truncated distribution under rejection verification.
        vocabulary: what the logits stand for, where they are not of all tokens.
    """

    def __init__(
        self,
        noise: NoiseSource,
        *,
        max_num_draft_probs: int = 64,
        vocabulary: TrimmedVocabulary | None = None,
    ) -> None:
        assert (noise.token_ids is None) == (vocabulary is None), "logits and noise are of the same tokens"
        self._noise = noise
        self._max_num_draft_probs = max_num_draft_probs
        self._vocabulary = vocabulary
        self._process = process_logits if vocabulary is None else vocabulary.process

    def draw(
        self, logits: Tensor, groups: Sequence[RowGroup], *, is_judged: bool = False
    ) -> list[DraftToken | None]:
        """One draft token per row; None where a trimmed vocabulary has none that is possible.

        Args:
            logits: unprocessed, ``[len(groups), vocab_size]``, or wider, with padding.
            groups: one row each.
            is_judged: says of each how likely it is accepted; not of those drawn for rejection verification.
        """
        processed = self._process(logits[:, : self._noise.row_size], groups)
        dead: set[int] = set()
        if self._vocabulary is not None and any(shifts_logits(group) for group in groups):
            is_dead = processed.amax(-1) == -math.inf
            dead.update(is_dead.nonzero()[:, 0].tolist())
            processed.masked_fill_(is_dead[:, None], 0.0)
        keys = [key for group in groups for key in draw_keys(group)]
        draws = draw_tokens(processed, keys, self._noise, is_judged=is_judged)
        drawn = [
            self._draw_truncated(row, group)
            if group.sampling.draws_by_rejection
            else DraftToken(self._token_id(draw.token_id), None, draw.lead)
            for row, group, draw in zip(processed, groups, draws, strict=True)
        ]
        return [None if row in dead else token for row, token in enumerate(drawn)] if dead else [*drawn]

    def _token_id(self, index: int) -> int:
        return index if self._vocabulary is None else self._vocabulary.token_id(index)

    def rank(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        counts: Sequence[int],
        excluded: Sequence[int | None],
    ) -> list[RankedRow]:
        """The tokens that the target is likeliest to draw at each row, best first.

        Under coupled verification the ranking uses the target's own noise, under rejection verification that
        of its residual draw; neither decides whether a draft token is accepted. How likely they are is read
        off the distances of the scores, but under rejection follows from row and place alone (geometrically,
        as in SSD/Saguaro, arXiv 2603.03251, theorem 12): what is likely decides which branches there are
        room for, and whether a round has draft tokens must not depend on the noise that will draw its own.

        Args:
            logits: unprocessed, ``[sum of num_rows, vocab_size]``.
            counts: most tokens wanted, per row.
            excluded: a token per row that cannot come (the rejected draft token), or None.
        """
        scores = add_draw_noise(
            self._rankable(logits[:, : self._noise.row_size], groups),
            groups,
            self._noise,
            rejection_purpose=Purpose.RESIDUAL_DRAW,
        )
        values, indices = scores.topk(num_ranked(scores.shape[1], counts), dim=-1)
        token_ids = [[self._token_id(index) for index in row] for row in indices.tolist()]
        logprobs = (values / SCORE_SPREAD).log_softmax(-1)
        return ranked_rows(logprobs.tolist(), token_ids, counts, excluded, groups)

    def _rankable(self, logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
        """Processed logits in which the tail is demoted, not impossible.

        The target cuts its own tail, elsewhere: where the draft's leaves the rejected token alone, its next
        ones are still the best guesses.
        """
        processed = self._process(logits, groups)
        if not any(cuts_tail(group.sampling) for group in groups):
            return processed
        uncut = self._process(logits, [without_tail_cut(group) for group in groups])
        return torch.where(processed == -math.inf, uncut - DEMOTION, uncut)

    def _draw_truncated(self, processed: Tensor, group: RowGroup) -> DraftToken:
        """Samples the likeliest tokens' renormalised distribution, rounded to the float32 that travels."""
        size = min(len(processed), self._max_num_draft_probs)
        values, indices = processed.topk(size)
        probs = values.softmax(-1, dtype=torch.float32)
        is_possible = probs > 0.0
        probs, indices = probs[is_possible], indices[is_possible]
        key = NoiseKey(group.sampling.seed, group.first_position, Purpose.DRAFT_DRAW)
        choice = draw_weighted(probs.double(), key, self._noise, indices)
        support = tuple(map(self._token_id, indices.tolist()))
        return DraftToken(support[choice], SparseProbs(support, tuple(probs.tolist())))


def num_ranked(vocab_size: int, counts: Sequence[int]) -> int:
    """Number of tokens that are looked at in each row when as many as ``counts`` are wanted."""
    return min(vocab_size, max(*counts, _MIN_RANKED) + 1)


def ranked_rows(
    logprobs: Sequence[list[float]],
    token_ids: Sequence[list[int]],
    counts: Sequence[int],
    excluded: Sequence[int | None],
    groups: Sequence[RowGroup],
) -> list[RankedRow]:
    """Makes ``DraftSampler.rank``'s answer from the best tokens of each row."""
    is_rejection = [group.sampling.draws_by_rejection for group in groups for _ in range(group.num_rows)]
    rows = zip(logprobs, token_ids, counts, excluded, is_rejection, strict=True)
    return [_ranked_row(*row) for row in rows]


def _ranked_row(
    logprobs: list[float], token_ids: list[int], count: int, excluded: int | None, is_rejection: bool
) -> RankedRow:
    by_token = {token: value for token, value in zip(token_ids, logprobs, strict=True) if value > -math.inf}
    skipped = UNLIKELY if excluded is None else by_token.pop(excluded, UNLIKELY)
    next_tokens = list(by_token.items())[:count]
    if not is_rejection:
        return RankedRow(next_tokens, skipped)
    likely = [
        _REJECTION_ACCEPTANCE,
        *((1 - _REJECTION_ACCEPTANCE) / 2**place for place in range(1, count + 1)),
    ]
    others = likely if excluded is None else likely[1:]
    ranked = [(token, math.log(share)) for (token, _), share in zip(next_tokens, others, strict=False)]
    return RankedRow(ranked, math.log(_REJECTION_ACCEPTANCE))
