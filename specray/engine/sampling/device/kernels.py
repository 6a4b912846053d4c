"""The heavy parts of sampling on a device, in torch's operators.

The Triton form (``kernels_triton``) is checked against these, which serve where Triton does not work. Nothing
here waits for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.sampling.device.rows import NO_NOISE, RowTable, TailCut
from specray.engine.sampling.noise import gumbel_from_words, philox_words_at


class Residuals(NamedTuple):
    """What the recovered and bonus tokens are drawn from, one entry for each sequence."""

    rows: Tensor
    """int64 ``[num_sequences]``: the row of logits."""
    keys: Tensor
    """int64 ``[num_sequences, 3]``, as in a row table."""
    draft_probs: Tensor
    """float64 ``[num_sequences, vocab_size]``: what is taken off; zeros where nothing was rejected."""


def divided(logits: Tensor, rows: RowTable) -> Tensor:
    """Logits over the temperatures, as float32 divides."""
    return logits / rows.divisors.to(logits.dtype)[:, None]


def processed(logits: Tensor, rows: RowTable, cut: TailCut | None) -> Tensor:
    """Logits over the temperatures, minus infinity where the tail is cut."""
    numbers = divided(logits, rows)
    return numbers if cut is None else numbers.masked_fill_(~_is_kept(numbers, cut), -math.inf)


def _is_kept(numbers: Tensor, cut: TailCut) -> Tensor:
    token = torch.arange(numbers.shape[1], dtype=torch.int32, device=numbers.device)
    threshold = cut.thresholds[:, None]
    return (numbers > threshold) | ((numbers == threshold) & (token <= cut.last_tied[:, None]))


class Kernels:
    """Works on logits ``[num_rows, vocab_size]``, float32, before the division by the temperature.

    These are torch's operators, on any device; a subclass has the same in kernels of its own.
    """

    def words(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Philox words, int64, of each row's ``token_ids`` ``[num_rows, any]``; keys as in a row table."""
        return philox_words_at(keys, token_ids)

    def gumbel(self, keys: Tensor, vocab_size: int) -> Tensor:
        """Gumbel noise of all tokens, float64 ``[num_rows, vocab_size]``; zeros in rows without noise."""
        token_ids = torch.arange(vocab_size, device=keys.device).expand(len(keys), vocab_size)
        return gumbel_from_words(philox_words_at(keys, token_ids)).masked_fill_(keys[:, 2:] == NO_NOISE, 0.0)

    def cut(self, logits: Tensor, rows: RowTable) -> TailCut:
        """Where top-k, top-p and min-p cut each row; as ``processors.keep_top`` has it."""
        numbers, vocab_size = divided(logits, rows), logits.shape[1]
        values = numbers.sort(dim=-1, descending=True).values
        size = torch.where(rows.top_k > 0, rows.top_k.clamp(max=vocab_size), vocab_size)[:, None]
        is_first = torch.arange(vocab_size, device=logits.device) < size
        # The total is that of the tokens which top-k has left.
        total = values.double().masked_fill(~is_first, -math.inf).logsumexp(-1, keepdim=True)
        reached = (values.double() - total).exp().cumsum(-1)
        top_p = rows.top_p[:, None]
        num_reaching = (reached[:, :-1] < top_p).sum(-1, keepdim=True) + 1
        num_kept = torch.minimum(size, torch.where(top_p < 1.0, num_reaching, vocab_size))
        threshold = values.gather(-1, num_kept - 1)
        is_tied = numbers == threshold
        num_tied_kept = num_kept - (numbers > threshold).sum(-1, keepdim=True)
        token = torch.arange(vocab_size, device=logits.device)
        is_kept = is_tied & (is_tied.cumsum(-1) <= num_tied_kept)
        last_tied = torch.where(is_kept, token, -1).amax(-1)
        least = values[:, 0] + rows.log_min_p.to(values.dtype)
        is_higher = least > threshold[:, 0]
        return TailCut(
            torch.where(is_higher, least, threshold[:, 0]),
            torch.where(is_higher, vocab_size, last_tied).int(),
        )

    def draw(
        self, logits: Tensor, rows: RowTable, cut: TailCut | None, *, is_judged: bool
    ) -> tuple[Tensor, Tensor]:
        """The first best token of each row with its noise, of float64 scores, and how far it leads.

        Returns:
            int64 and float32 ``[num_rows]``; leads as ``draws.Draw`` has them, zeros unless ``is_judged``.
        """
        scores = processed(logits, rows, cut) + self.gumbel(rows.keys, logits.shape[1])
        tokens = scores.argmax(-1)
        if not is_judged:
            return tokens, torch.zeros(len(tokens), device=logits.device)
        # Scores count twice: SCORE_SPREAD is a half.
        spread = 2.0 * scores.float()
        return tokens, spread.amax(-1) - spread.logsumexp(-1)

    def draw_best(self, logits: Tensor, rows: RowTable, first_token_id: int) -> tuple[Tensor, Tensor]:
        """The first best token of each row with its noise, where logits are of the ids from one on.

        Args:
            first_token_id: a multiple of 4.

        Returns:
            float64 scores and int64 token ids ``[num_rows]``.
        """
        noise = self.gumbel(rows.keys, first_token_id + logits.shape[1])[:, first_token_id:]
        scores, token_ids = (divided(logits, rows) + noise).max(-1)
        return scores, token_ids + first_token_id

    def sums(self, logits: Tensor, rows: RowTable, cut: TailCut | None) -> tuple[Tensor, Tensor]:
        """Each row's largest logit, float32, and the float64 sum of exp(logit - largest) of what is kept."""
        numbers = processed(logits, rows, cut)
        largest = numbers.amax(-1)
        return largest, (numbers.double() - largest.double()[:, None]).exp().sum(-1)

    def draw_residuals(
        self,
        logits: Tensor,
        rows: RowTable,
        cut: TailCut | None,
        sums: tuple[Tensor, Tensor],
        residuals: Residuals,
    ) -> Tensor:
        """Draws from each sequence's residual distribution; where it is empty, from the row's own.

        Returns:
            Tokens, int64 ``[num_sequences]``.
        """
        own = residuals.rows
        numbers = processed(logits, rows, cut).index_select(0, own).double()
        largest, total = (each.index_select(0, own)[:, None] for each in sums)
        probs = (numbers - largest.double()).exp() / total
        weights = (probs - residuals.draft_probs).clamp_(min=0.0)
        # Equal distributions reject only by rounding, and then leave nothing.
        weights = torch.where(weights.amax(-1, keepdim=True) > 0.0, weights, probs)
        return (weights.log() + self.gumbel(residuals.keys, logits.shape[1])).argmax(-1)
