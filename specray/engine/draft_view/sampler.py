"""Draws the target's tokens from the logits of a draft with another vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.sampler import MappedRows, Sampler, make_sampler


class PartnerSampler(MappedRows):
    """Implements :class:`Sampler` for logits of another vocabulary, of which some have a partner here.

    Args:
        sampler: for logits of the partners, in the order of ``columns``.
        columns: the logits that have a partner.
    """

    def __init__(self, sampler: Sampler, columns: Tensor) -> None:
        super().__init__(sampler)
        self._columns = columns

    def mapped(self, logits: Tensor) -> Tensor:
        return logits.index_select(1, self._columns)


def partner_sampler(
    draft_ids: Mapping[int, int],
    device: torch.device,
    *,
    vocab_size: int,
    max_num_draft_probs: int,
    token_ids: NDArray[np.int64] | None = None,
) -> PartnerSampler:
    """A sampler of the target's tokens: noise, penalties, masks and probabilities are by their ids.

    Args:
        draft_ids: the draft's id by the target's, of the tokens that both have.
        device: device of the logits.
        vocab_size: of the target.
        token_ids: the draft's ids of the logits, ascending; None: of all its tokens.
    """
    columns, ids = partner_columns(draft_ids, token_ids)
    sampler = make_sampler(vocab_size, device, max_num_draft_probs, token_ids=ids)
    return PartnerSampler(sampler, torch.from_numpy(columns).to(device))


def partner_columns(
    draft_ids: Mapping[int, int], token_ids: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The draft's logits that have a partner, and the target's ids of these, ascending."""
    pairs = sorted(draft_ids.items())
    if token_ids is not None:
        columns = {token_id: column for column, token_id in enumerate(token_ids.tolist())}
        pairs = [(own, columns[theirs]) for own, theirs in pairs if theirs in columns]
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return np.ascontiguousarray(array[:, 1]), np.ascontiguousarray(array[:, 0])
