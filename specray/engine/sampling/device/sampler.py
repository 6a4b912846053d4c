"""Sampling where the logits are: whatever the parameters, one copy in and one copy out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import TypeVar

import torch
from torch import Tensor

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.device.edits import Edit, plan_edits
from specray.engine.sampling.device.kernels import Kernels, divided, processed
from specray.engine.sampling.device.rejection import plan_rejection
from specray.engine.sampling.device.rows import RowPlan, RowTable, TailCut, key_words, plan_rows
from specray.engine.sampling.device.upload import Sent, Upload, UploadPiece
from specray.engine.sampling.draft import DEMOTION, DraftToken, RankedRow, num_ranked, ranked_rows
from specray.engine.sampling.draws import SCORE_SPREAD
from specray.engine.sampling.noise import NoiseKey, Purpose, gumbel_from_words
from specray.engine.sampling.state import RowGroup
from specray.engine.sampling.verify import Round, Verified, accept_own, draw_keys

T = TypeVar("T")


class DeviceSampler:
    """Implements ``sampler.Sampler``.

    Args:
        kernels: that work on the device of the logits.
        max_num_draft_probs: support of the truncated distribution under rejection verification.
    """

    def __init__(self, kernels: Kernels, max_num_draft_probs: int) -> None:
        self._kernels = kernels
        self._max_num_draft_probs = max_num_draft_probs

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        groups = [item.group for item in rounds]
        step = _SamplingStep(logits, groups)
        rejection = plan_rejection(step.upload, rounds)
        step.send()
        cut = step.cut(self._kernels)
        parts = []
        if any(not group.is_tested for group in groups):
            tokens, _ = self._kernels.draw(step.logits, step.table, cut, is_judged=False)
            parts.append(tokens)
        if rejection is not None:
            verdicts = rejection.verify(self._kernels, step.logits, step.table, cut, step.sent)
            parts.append(verdicts.T.reshape(-1))
        answer: list[int] = torch.cat(parts).cpu().tolist()
        return _verdicts(answer, rounds)

    def draw(
        self, logits: Tensor, groups: Sequence[RowGroup], *, is_judged: bool = False
    ) -> list[DraftToken]:
        step = _SamplingStep(logits, groups)
        truncated = _plan_truncated(step.upload, groups)
        step.send()
        cut = step.cut(self._kernels)
        tokens, leads = self._kernels.draw(step.logits, step.table, cut, is_judged=is_judged)
        # Token ids are exact in float64.
        parts = [tokens.double(), leads.double()]
        if truncated is not None:
            rows, keys = (step.sent[piece] for piece in truncated)
            numbers = processed(step.logits, step.table, cut).index_select(0, rows)
            parts.append(draw_truncated(self._kernels, numbers, keys, self._support_size(numbers)).view(-1))
        answer: list[float] = torch.cat(parts).cpu().tolist()
        count = len(groups)
        rest = iter(_split(answer[2 * count :], 1 + 2 * self._support_size(logits)))
        return [
            truncated_token(next(rest))
            if group.sampling.draws_by_rejection
            else DraftToken(int(token), None, lead)
            for group, token, lead in zip(groups, answer[:count], answer[count : 2 * count], strict=True)
        ]

    def rank(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        counts: Sequence[int],
        excluded: Sequence[int | None],
    ) -> list[RankedRow]:
        step = _SamplingStep(logits, groups, rejection_purpose=Purpose.RESIDUAL_DRAW)
        step.send()
        cut = step.cut(self._kernels)
        scores = divided(step.logits, step.table)
        if cut is not None:
            is_cut = processed(step.logits, step.table, cut) == -math.inf
            scores = torch.where(is_cut, scores - DEMOTION, scores)
        scores = scores + self._kernels.gumbel(step.table.keys, logits.shape[1])
        values, token_ids = scores.topk(num_ranked(logits.shape[1], counts), dim=-1)
        logprobs = (values / SCORE_SPREAD).log_softmax(-1)
        answer: list[list[list[float]]] = torch.stack((logprobs, token_ids.double())).cpu().tolist()
        rows = [[int(token) for token in row] for row in answer[1]]
        return ranked_rows(answer[0], rows, counts, excluded, groups)

    def _support_size(self, logits: Tensor) -> int:
        return min(logits.shape[1], self._max_num_draft_probs)


def draw_truncated(kernels: Kernels, numbers: Tensor, keys: Tensor, size: int) -> Tensor:
    """Samples the likeliest tokens' renormalised distribution, rounded to the float32 that travels.

    Args:
        numbers: processed logits, ``[num_rows, vocab_size]``.
        keys: of each row, as in a row table.
        size: number of the likeliest tokens.

    Returns:
        float64 ``[num_rows, 1 + 2 * size]``: the token, the likeliest ones, their probabilities.
    """
    values, token_ids = numbers.topk(size, dim=-1)
    probs = values.softmax(-1, dtype=torch.float32).double()
    noise = gumbel_from_words(kernels.words(keys, token_ids))
    choice = (probs.log() + noise).argmax(-1, keepdim=True)
    return torch.cat((token_ids.gather(1, choice).double(), token_ids.double(), probs), dim=1)


class _SamplingStep:
    """A step's rows, first as they are planned, then on the device."""

    def __init__(
        self, logits: Tensor, groups: Sequence[RowGroup], *, rejection_purpose: Purpose | None = None
    ) -> None:
        self.upload = Upload()
        self.logits = logits
        keys = [key for group in groups for key in draw_keys(group, rejection_purpose)]
        assert len(keys) == len(logits), (len(keys), logits.shape)
        self._rows: RowPlan = plan_rows(self.upload, groups, keys)
        self._edits: list[Edit] = plan_edits(self.upload, groups, logits.shape[1])
        self.sent: Sent
        self.table: RowTable

    def send(self) -> None:
        self.sent = self.upload.send(self.logits.device)
        self.table = self._rows.table(self.sent)
        own = self.logits.float().contiguous()
        if self._edits and own is self.logits:
            own = own.clone()
        for edit in self._edits:
            edit(own, self.sent)
        self.logits = own

    def cut(self, kernels: Kernels) -> TailCut | None:
        """Where the rows' tails are cut; None: nowhere."""
        return kernels.cut(self.logits, self.table) if self.table.cuts else None


def _plan_truncated(upload: Upload, groups: Sequence[RowGroup]) -> tuple[UploadPiece, UploadPiece] | None:
    is_own = [group.sampling.draws_by_rejection for group in groups]
    if not any(is_own):
        return None
    keys = [
        NoiseKey(group.sampling.seed, group.first_position, Purpose.DRAFT_DRAW)
        for group in compress(groups, is_own)
    ]
    return upload.add(torch.tensor(is_own).nonzero()[:, 0].numpy()), upload.add(key_words(keys))


def truncated_token(numbers: Sequence[float]) -> DraftToken:
    """Reads a row of :func:`draw_truncated`."""
    size = len(numbers) // 2
    support, probs = numbers[1 : 1 + size], numbers[1 + size :]
    possible = [(int(token), prob) for token, prob in zip(support, probs, strict=True) if prob > 0.0]
    return DraftToken(
        int(numbers[0]),
        SparseProbs(tuple(token for token, _ in possible), tuple(prob for _, prob in possible)),
    )


def _verdicts(answer: Sequence[int], rounds: Sequence[Round]) -> list[Verified]:
    """Reads what ``DeviceSampler.verify`` copied: the own tokens of all rows, if any, then pairs."""
    num_rows = sum(item.group.num_rows for item in rounds)
    num_own = sum(item.group.num_rows for item in rounds if not item.group.is_tested)
    pairs = iter(_split(answer[num_rows if num_own else 0 :], 2))
    verified, start = [], 0
    for item in rounds:
        end = start + item.group.num_rows
        if item.group.is_tested:
            verified.append(Verified(*next(pairs)))
        else:
            verified.append(accept_own(answer[start:end], item.group))
        start = end
    return verified


def _split(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
