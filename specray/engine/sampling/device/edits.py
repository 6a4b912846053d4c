"""Processors of single tokens for all rows at once: bias, penalties, and what is forbidden.

The host turns each group's settings into indices, which are sent with everything else; then each processor is
a few operations over all rows that have it, whatever their number. The meaning of each, and their order, is
that of ``processors``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.bad_words import bad_ends
from specray.engine.sampling.device.upload import Sent, Upload
from specray.engine.sampling.penalties import tally
from specray.engine.sampling.processors import shifts_logits
from specray.engine.sampling.state import RowGroup

Edit = Callable[[Tensor, Sent], None]
"""Function that changes logits ``[num_rows, vocab_size]``, contiguous, in place."""
_Ints = NDArray[np.int64]


class _Block:
    """A group's rows among all rows."""

    def __init__(self, group: RowGroup, start: int) -> None:
        self.group = group
        self.rows: _Ints = np.arange(start, start + group.num_rows, dtype=np.int64)


def plan_edits(upload: Upload, groups: Sequence[RowGroup], vocab_size: int) -> list[Edit]:
    """Adds to what is sent whatever the groups' processors need.

    Returns:
        The processors that any group has, in their order.
    """
    starts = np.cumsum([0, *(group.num_rows for group in groups)])
    blocks = [
        _Block(group, int(start))
        for group, start in zip(groups, starts, strict=False)
        if shifts_logits(group)
    ]
    plans = (
        _plan_bias,
        _plan_repetition,
        _plan_counts,
        _plan_allowed,
        _plan_early_stop,
        _plan_bad_words,
        _plan_grammars,
    )
    edits = [plan(upload, blocks, vocab_size) for plan in plans]
    return [edit for edit in edits if edit is not None]


def _plan_bias(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    places, values = [], []
    for block in blocks:
        # A draft may have fewer tokens than the target, so what it lacks is skipped.
        pairs = [pair for pair in block.group.sampling.logit_bias if pair[0] < vocab_size]
        if pairs:
            places.append(_places(block.rows, [pair[0] for pair in pairs], vocab_size))
            values.append(np.tile([pair[1] for pair in pairs], len(block.rows)).astype(np.float64))
    if not places:
        return None
    where, bias = upload.add(np.concatenate(places)), upload.add(np.concatenate(values))

    def edit(logits: Tensor, sent: Sent) -> None:
        logits.view(-1).index_add_(0, sent[where], sent[bias].to(logits.dtype))

    return edit


def _plan_repetition(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    own = [block for block in blocks if block.group.state.counts is not None]
    if not own:
        return None
    counting = _plan_counting(
        upload, own, [_known(block.group.state.counts) for block in own], None, vocab_size
    )
    penalty = upload.add(_by_row(own, [block.group.sampling.repetition_penalty for block in own]))

    def edit(logits: Tensor, sent: Sent) -> None:
        counts, places = counting(sent)
        numbers = logits.view(-1).index_select(0, places.view(-1)).view(places.shape)
        factor = sent[penalty].to(logits.dtype)[:, None]
        penalised = torch.where(numbers > 0, numbers / factor, numbers * factor)
        changed = torch.where(counts > 0, penalised, numbers)
        logits.view(-1).index_copy_(0, places.view(-1), changed.view(-1))

    return edit


def _plan_counts(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    own = [block for block in blocks if block.group.state.output_counts is not None]
    if not own:
        return None
    known = [_known(block.group.state.output_counts) for block in own]
    starts = [block.group.sampling.num_prompt_tokens for block in own]
    counting = _plan_counting(upload, own, known, starts, vocab_size)
    frequency = upload.add(_by_row(own, [block.group.sampling.frequency_penalty for block in own]))
    presence = upload.add(_by_row(own, [block.group.sampling.presence_penalty for block in own]))

    def edit(logits: Tensor, sent: Sent) -> None:
        times, places = counting(sent)
        by_count, once = (sent[piece].to(logits.dtype)[:, None] for piece in (frequency, presence))
        # The product in float64 is exact, so that the sum is rounded once, as where products are fused.
        numbers = logits.view(-1).index_select(0, places.view(-1)).view(places.shape).double()
        numbers = (numbers - by_count.double() * times).to(logits.dtype) - once * (times > 0)
        logits.view(-1).index_copy_(0, places.view(-1), numbers.view(-1))

    return edit


def _plan_counting(
    upload: Upload,
    blocks: Sequence[_Block],
    known: Sequence[Mapping[int, int]],
    starts: Sequence[int] | None,
    vocab_size: int,
) -> Callable[[Sent], tuple[Tensor, Tensor]]:
    """Plans counts of the tokens in each row's prefix, and the places of their logits.

    Both are ``[rows of the blocks, most tokens of a block]``, float32 and int64 (indices among all logits).
    Where a block has fewer tokens its last one is repeated, with the same count: written twice, it stays the
    same number.

    Args:
        known: counts of each block's prefix; tokens under verification are added row by row.
        starts: of each block, index from which on tokens count; None: all.
    """
    tokens, times = [], []
    for block, of_prefix in zip(blocks, known, strict=True):
        own, num_times = _tallied(of_prefix, block.group.token_ids, vocab_size)
        tokens.append(own)
        times.append(num_times)
    lengths = np.array([len(own) for own in tokens])
    width = int(lengths.max())
    slots = np.minimum(np.arange(width), lengths[:, None] - 1)
    indices = (np.cumsum(lengths) - lengths)[:, None] + slots
    token_table, count_table = np.concatenate(tokens)[indices], np.concatenate(times)[indices]
    added, first = [], 0
    for index, block in enumerate(blocks):
        rows, behind = _pairs(block.group)
        drafted = np.array(block.group.token_ids, dtype=np.int64)[behind]
        counted = np.array(block.group.positions)[1 + behind] > (0 if starts is None else starts[index])
        counted &= drafted < vocab_size
        drafts = drafted[counted]
        added.append((first + rows[counted]) * width + np.searchsorted(tokens[index], drafts))
        first += block.group.num_rows
    table, counts = upload.add(token_table), upload.add(count_table)
    more = upload.add(np.concatenate(added)) if any(map(len, added)) else None
    slot_of_place = upload.add(slots)
    block_of_row = upload.add(np.repeat(np.arange(len(blocks)), [len(block.rows) for block in blocks]))
    row_starts = upload.add(_all_rows(blocks) * vocab_size)

    def count(sent: Sent) -> tuple[Tensor, Tensor]:
        of_row = sent[block_of_row]
        by_row = sent[counts].index_select(0, of_row).float()
        if more is not None:
            indices = sent[more]
            by_row.view(-1).index_add_(0, indices, torch.ones_like(indices, dtype=torch.float32))
            by_row = by_row.gather(1, sent[slot_of_place].index_select(0, of_row))
        places = sent[table].index_select(0, of_row) + sent[row_starts][:, None]
        return by_row, places

    return count


def _tallied(
    of_prefix: Mapping[int, int], draft_ids: Sequence[int], vocab_size: int
) -> tuple[_Ints, NDArray[np.float64]]:
    """Counts tokens as ``penalties.tally`` does, but in ascending order, and at least one."""
    ids, times = tally(of_prefix, draft_ids, vocab_size)
    order = np.argsort(ids)
    return (ids[order], times[order]) if len(ids) else (np.zeros(1, np.int64), np.zeros(1))


def _pairs(group: RowGroup) -> tuple[_Ints, _Ints]:
    if group.parents is None:
        return np.tril_indices(group.num_rows, -1)
    pairs = [(row, index) for row in range(group.num_rows) for index in group.path(row)]
    rows, indices = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return rows, indices


def _plan_allowed(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    own: list[_Block] = []
    places: list[_Ints] = []
    for block in blocks:
        tokens = [token for token in block.group.sampling.allowed_token_ids if token < vocab_size]
        if tokens:
            places.append(len(own) * vocab_size + np.array(tokens, dtype=np.int64))
            own.append(block)
    if not own:
        return None
    where, rows = upload.add(np.concatenate(places)), upload.add(_all_rows(own))
    block_of_row = upload.add(np.repeat(np.arange(len(own)), [len(block.rows) for block in own]))

    def edit(logits: Tensor, sent: Sent) -> None:
        is_forbidden = torch.ones(len(own) * vocab_size, dtype=torch.bool, device=logits.device)
        is_forbidden.index_fill_(0, sent[where], False)
        by_row = is_forbidden.view(len(own), vocab_size).index_select(0, sent[block_of_row])
        numbers = logits.index_select(0, sent[rows]).masked_fill_(by_row, -math.inf)
        logits.index_copy_(0, sent[rows], numbers)

    return edit


def _plan_early_stop(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    places = []
    for block in blocks:
        sampling = block.group.sampling
        is_early = np.array(block.group.positions) < sampling.num_prompt_tokens + sampling.min_tokens
        stops = [token for token in sampling.stop_token_ids if token < vocab_size]
        if stops and is_early.any():
            places.append(_places(block.rows[is_early], stops, vocab_size))
    if not places:
        return None
    where = upload.add(np.concatenate(places))

    def edit(logits: Tensor, sent: Sent) -> None:
        logits.view(-1).index_fill_(0, sent[where], -math.inf)

    return edit


def _plan_bad_words(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    """Forbids the last token of a bad word after its others, where that leaves some token."""
    pairs = [pair for block in blocks for pair in _bad_pairs(block, vocab_size)]
    if not pairs:
        return None
    # Whether any token is left is asked once for each row that has a bad word.
    affected, index = np.unique(np.array([row for row, _ in pairs], dtype=np.int64), return_inverse=True)
    where = upload.add(np.array([row * vocab_size + token for row, token in pairs], dtype=np.int64))
    rows, row_of_pair = upload.add(affected), upload.add(index.reshape(-1))

    def edit(logits: Tensor, sent: Sent) -> None:
        flat, places = logits.view(-1), sent[where]
        before = flat.index_select(0, places)
        flat.index_fill_(0, places, -math.inf)
        is_dead = logits.index_select(0, sent[rows]).amax(-1) == -math.inf
        after = torch.where(is_dead.index_select(0, sent[row_of_pair]), before, -math.inf)
        flat.index_copy_(0, places, after)

    return edit


def _bad_pairs(block: _Block, vocab_size: int) -> Iterator[tuple[int, int]]:
    for row, token in bad_ends(block.group):
        if token < vocab_size:
            yield int(block.rows[0]) + row, token


def _plan_grammars(upload: Upload, blocks: Sequence[_Block], vocab_size: int) -> Edit | None:
    own = [block for block in blocks if block.group.token_masks is not None]
    if not own:
        return None
    masks = np.concatenate([block.group.token_masks for block in own if block.group.token_masks is not None])
    assert masks.shape[0] == sum(len(block.rows) for block in own), masks.shape
    assert masks.shape[1] * 32 >= vocab_size, (masks.shape, vocab_size)
    if masks.shape[1] % 2:
        masks = np.pad(masks, ((0, 0), (0, 1)))
    words = upload.add(np.ascontiguousarray(masks).view(np.int64))
    rows = upload.add(_all_rows(own))

    def edit(logits: Tensor, sent: Sent) -> None:
        token = torch.arange(vocab_size, device=logits.device)
        bits = sent[words].view(torch.int32).index_select(1, token >> 5) >> (token & 31).int()
        numbers = logits.index_select(0, sent[rows]).masked_fill_((bits & 1) == 0, -math.inf)
        logits.index_copy_(0, sent[rows], numbers)

    return edit


def _places(rows: _Ints, token_ids: Sequence[int], vocab_size: int) -> _Ints:
    return (rows[:, None] * vocab_size + np.array(token_ids, dtype=np.int64)).reshape(-1)


def _all_rows(blocks: Sequence[_Block]) -> _Ints:
    return np.concatenate([block.rows for block in blocks])


def _by_row(blocks: Sequence[_Block], values: Sequence[float]) -> NDArray[np.float64]:
    return np.repeat(np.array(values, dtype=np.float64), [len(block.rows) for block in blocks])


def _known(counts: Mapping[int, int] | None) -> Mapping[int, int]:
    assert counts is not None, "the block has a penalty"
    return counts
