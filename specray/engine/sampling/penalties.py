"""Repetition, presence and frequency penalties, computed for the tokens that occur and for no others.

A prefix holds few of a vocabulary's tokens, and the logits of all others stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.state import RowGroup


def apply_penalties(logits: Tensor, group: RowGroup) -> None:
    """Changes a group's logits ``[num_rows, vocab_size]`` in place.

    The repetition penalty is over prompt and output, the others over the output. Every operation is rounded
    by itself or exact, so that a row's bits depend neither on the rows next to it nor on vector instructions.
    """
    sampling, state, device = group.sampling, group.state, logits.device
    kind = np.float64 if logits.dtype == torch.float64 else np.float32
    if state.counts is not None:
        token_ids, counts = _counts_by_row(group, state.counts, 0, logits.shape[1])
        ids = torch.from_numpy(token_ids).to(device)
        factor = torch.from_numpy(np.where(counts > 0, kind(sampling.repetition_penalty), kind(1))).to(device)
        numbers = logits.index_select(1, ids)
        logits.index_copy_(1, ids, torch.where(numbers > 0, numbers / factor, numbers * factor))
    if state.output_counts is not None:
        first = sampling.num_prompt_tokens
        token_ids, counts = _counts_by_row(group, state.output_counts, first, logits.shape[1])
        ids = torch.from_numpy(token_ids).to(device)
        # The product in float64 is exact, so that the sum is rounded once, as where products are fused.
        by_count = torch.from_numpy(float(kind(sampling.frequency_penalty)) * counts).to(device)
        once = torch.from_numpy(kind(sampling.presence_penalty) * (counts > 0)).to(device)
        numbers = logits.index_select(1, ids).double() - by_count
        logits.index_copy_(1, ids, numbers.to(logits.dtype) - once)


def _counts_by_row(
    group: RowGroup, of_prefix: Mapping[int, int], start: int, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens of prefix and drafts ``[n]``, and their counts in each row's prefix ``[num_rows, n]``.

    Only tokens from index ``start`` on are counted.
    """
    ids, times = tally(of_prefix, group.token_ids, vocab_size)
    counts = np.repeat(times[None], group.num_rows, 0)
    for row, token_id in enumerate(group.token_ids, start=1):
        # A row sees all that the one of its parent sees and one token more; in a chain so do all below.
        if group.parents is not None:
            counts[row] = counts[group.parents[row - 1] + 1]
        if token_id < vocab_size and group.positions[row] > start:
            counts[row : None if group.parents is None else row + 1, ids == token_id] += 1.0
    return ids, counts


def tally(
    of_prefix: Mapping[int, int], draft_ids: Sequence[int], vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens of a prefix and those that only the drafts after it have, with the prefix's counts.

    Tokens that the logits lack are left out: a prefix may hold tokens that a draft has not.
    """
    new = [token_id for token_id in dict.fromkeys(draft_ids) if token_id not in of_prefix]
    size = len(of_prefix) + len(new)
    ids = np.fromiter(itertools.chain(of_prefix.keys(), new), np.int64, size)
    times = np.fromiter(itertools.chain(of_prefix.values(), itertools.repeat(0)), np.float64, size)
    if size and ids.max() >= vocab_size:
        is_known = ids < vocab_size
        ids, times = ids[is_known], times[is_known]
    return ids, times
