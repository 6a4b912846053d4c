"""Rejection verification of all sequences of a step at once, by the rule of ``verify.verify_rejection``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.device.kernels import Kernels, Residuals
from specray.engine.sampling.device.rows import RowTable, TailCut, key_words
from specray.engine.sampling.device.upload import Sent, Upload, UploadPiece
from specray.engine.sampling.noise import NoiseKey, Purpose, uniform_from_words
from specray.engine.sampling.verify import Round


@dataclass(frozen=True, slots=True)
class RejectionPlan:
    """The sequences of a step that are verified by rejection; all have as many places as the longest."""

    rows: UploadPiece
    """int64 ``[num_sequences, num_places]``: rows of logits; after a sequence's last row that row again."""
    token_ids: UploadPiece
    """int64 ``[num_sequences, num_places]``: draft tokens."""
    support: UploadPiece
    """int64 ``[num_sequences, num_places, width]``: tokens that the draft could have drawn."""
    probs: UploadPiece
    """float64, as ``support``: their weights; zeros where there is no draft token."""
    accept_keys: UploadPiece
    """int64 ``[num_sequences * num_places, 3]``."""
    draw_keys: UploadPiece
    """int64 ``[num_sequences, 3]``, of the residual draw at the first place."""

    def verify(
        self, kernels: Kernels, logits: Tensor, table: RowTable, cut: TailCut | None, sent: Sent
    ) -> Tensor:
        """Verifies.

        Returns:
            int64 ``[2, num_sequences]``: numbers of accepted tokens, and the tokens that follow them.
        """
        rows, token_ids, support = sent[self.rows], sent[self.token_ids], sent[self.support]
        probs = sent[self.probs]
        whole = probs.sum(-1, keepdim=True)
        probs = probs / torch.where(whole > 0.0, whole, 1.0)
        draft_prob = torch.where(support == token_ids[..., None], probs, 0.0).sum(-1)
        sums = kernels.sums(logits, table, cut)
        target_prob = _probs_of(logits, table, cut, sums, rows, token_ids)
        words = kernels.words(sent[self.accept_keys], torch.zeros_like(rows).view(-1, 1))
        uniform = uniform_from_words(words).view(rows.shape)
        # Where there is no draft token it has no probability either.
        is_accepted = (draft_prob > 0.0) & (uniform * draft_prob < target_prob)
        num_accepted = is_accepted.long().cumprod(-1).sum(-1)
        residuals = self._residuals(sent, num_accepted, rows, probs, logits.shape[1])
        return torch.stack((num_accepted, kernels.draw_residuals(logits, table, cut, sums, residuals)))

    def _residuals(
        self, sent: Sent, num_accepted: Tensor, rows: Tensor, probs: Tensor, vocab_size: int
    ) -> Residuals:
        at = num_accepted[:, None]
        width = probs.shape[2]
        wide = at[..., None].expand(-1, 1, width)
        support, taken = (each.gather(1, wide)[:, 0] for each in (sent[self.support], probs))
        dense = torch.zeros(len(rows), vocab_size, dtype=torch.float64, device=rows.device)
        # Padding adds nothing to a token.
        dense.scatter_add_(1, support, taken)
        seeds, position, purpose = sent[self.draw_keys].unbind(-1)
        keys = torch.stack((seeds, position + num_accepted, purpose), -1)
        return Residuals(rows.gather(1, at)[:, 0], keys, dense)


def _probs_of(
    logits: Tensor,
    table: RowTable,
    cut: TailCut | None,
    sums: tuple[Tensor, Tensor],
    rows: Tensor,
    ids: Tensor,
) -> Tensor:
    """The target's probabilities, float64, of one token in each of some rows; both indices of one shape."""
    flat, own = rows.reshape(-1), ids.reshape(-1)
    number = logits.view(-1).index_select(0, flat * logits.shape[1] + own)
    number = number / table.divisors.index_select(0, flat).to(number.dtype)
    largest, total = (each.index_select(0, flat) for each in sums)
    prob = (number.double() - largest.double()).exp() / total
    if cut is not None:
        threshold, last = (each.index_select(0, flat) for each in cut)
        prob = torch.where((number > threshold) | ((number == threshold) & (own <= last)), prob, 0.0)
    return prob.view(rows.shape)


def plan_rejection(upload: Upload, rounds: Sequence[Round]) -> RejectionPlan | None:
    """Adds the rounds that are verified by rejection to what is sent; None: there are none."""
    starts = np.cumsum([0, *(item.group.num_rows for item in rounds)])
    own = [(item, int(start)) for item, start in zip(rounds, starts, strict=False) if item.group.is_tested]
    if not own:
        return None
    num_places = max(item.group.num_rows for item, _ in own)
    # Without a distribution a token counts as chosen with certainty.
    drafted = [
        item.draft_probs or [SparseProbs((token,), (1.0,)) for token in item.draft_token_ids]
        for item, _ in own
    ]
    width = max((len(probs.token_ids) for each in drafted for probs in each), default=1)
    shape = (len(own), num_places)
    rows, token_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    support, probs = np.zeros((*shape, width), np.int64), np.zeros((*shape, width), np.float64)
    for index, ((item, start), each) in enumerate(zip(own, drafted, strict=True)):
        count = len(item.draft_token_ids)
        assert item.group.num_rows == count + 1 and len(each) == count, (
            item.group.num_rows,
            count,
            len(each),
        )
        rows[index] = start + np.minimum(np.arange(num_places), count)
        token_ids[index, :count] = item.draft_token_ids
        for place, sparse in enumerate(each):
            support[index, place, : len(sparse.token_ids)] = sparse.token_ids
            probs[index, place, : len(sparse.probs)] = sparse.probs
    firsts = [(item.group.sampling.seed, item.group.first_position) for item, _ in own]
    tests = [
        NoiseKey(seed, position + place, Purpose.ACCEPT_TEST)
        for seed, position in firsts
        for place in range(num_places)
    ]
    draws = [NoiseKey(seed, position, Purpose.RESIDUAL_DRAW) for seed, position in firsts]
    return RejectionPlan(
        rows=upload.add(rows),
        token_ids=upload.add(token_ids),
        support=upload.add(support),
        probs=upload.add(probs),
        accept_keys=upload.add(key_words(tests)),
        draw_keys=upload.add(key_words(draws)),
    )
