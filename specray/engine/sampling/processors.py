"""Logits processors: applied to every row with the state of exactly that row's prefix.

Order: logit bias, repetition / presence / frequency penalties, allowed tokens, min_tokens, bad words,
grammar, temperature, top-k, top-p, min-p. The meaning of each is that of vLLM and transformers. What depends
on the prefix is read from its ``SamplingState``; tokens under verification are counted row by row here, so a
rejected one needs no undoing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.bad_words import bad_ends
from specray.engine.sampling.penalties import apply_penalties
from specray.engine.sampling.state import RowGroup
from specray.types import SamplingParams

_MIN_TEMPERATURE = 1e-5
"""Smallest divisor of logits; below it every draw is the argmax, and float32 would overflow."""
_FIRST_TOP = 256
"""Number of likeliest tokens tried for top-p before all are sorted."""


def process_logits(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Applies each group's processors to its rows.

    Greedy groups (temperature 0) take only what can change the argmax: bias, penalties and what is forbidden.

    Args:
        logits: ``[sum of num_rows, vocab_size]``, the groups' rows in order; left unchanged.

    Returns:
        Float32 (float64 stays) of the same shape; impossible tokens are -inf, at least one is not. May be
        ``logits`` itself when there is nothing to do.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if any(shifts_logits(group) for group in groups):
        logits = logits.clone()
        start = 0
        for group in groups:
            if shifts_logits(group):
                _shift_logits(logits[start : start + group.num_rows], group)
            start += group.num_rows
    logits = _scale(logits, groups)
    return _cut_tails(logits, groups) if any(cuts_tail(group.sampling) for group in groups) else logits


def shifts_logits(group: RowGroup) -> bool:
    """True when bias, penalties or what is forbidden change single logits."""
    sampling = group.sampling
    return (
        group.token_masks is not None
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
        or bool(sampling.allowed_token_ids)
        or bool(sampling.bad_words)
        or (sampling.min_tokens > 0 and bool(sampling.stop_token_ids))
    )


def _shift_logits(logits: Tensor, group: RowGroup) -> None:
    """Applies in place what depends on single tokens: bias, penalties, min_tokens."""
    _add_bias(logits, group.sampling)
    apply_penalties(logits, group)
    _forbid_others(logits, group.sampling)
    _forbid_early_stop(logits, group)
    _forbid_bad_words(logits, group)
    if group.token_masks is not None:
        _forbid_by_grammar(logits, group.token_masks)


def cuts_tail(sampling: SamplingParams) -> bool:
    """True when top-k, top-p or min-p make unlikely tokens impossible."""
    return not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def without_tail_cut(group: RowGroup) -> RowGroup:
    """The same rows with every token possible that bias, penalties and min_tokens leave possible."""
    return replace(group, sampling=replace(group.sampling, top_k=0, top_p=1.0, min_p=0.0))


def divisor_of(sampling: SamplingParams) -> float:
    return 1.0 if sampling.is_greedy else max(sampling.temperature, _MIN_TEMPERATURE)


def _scale(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    divisors = [divisor_of(group.sampling) for group in groups for _ in range(group.num_rows)]
    if all(divisor == 1.0 for divisor in divisors):
        return logits
    # By a tensor even where all are equal: for a number CUDA multiplies by its reciprocal, and a row's last
    # bits would depend on the temperatures next to it.
    return logits / torch.tensor([[each] for each in divisors], dtype=logits.dtype, device=logits.device)


def _cut_tails(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    cut, start = [], 0
    for settings, run in itertools.groupby(groups, key=_tail_settings):
        end = start + sum(group.num_rows for group in run)
        cut.append(_cut_tail(logits[start:end], *settings))
        start = end
    return cut[0] if len(cut) == 1 else torch.cat(cut)


def _tail_settings(group: RowGroup) -> tuple[int, float, float]:
    sampling = group.sampling
    return (0, 1.0, 0.0) if sampling.is_greedy else (sampling.top_k, sampling.top_p, sampling.min_p)


def _cut_tail(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    if top_k > 0 or top_p < 1.0:
        logits = keep_top(logits, top_k=top_k, top_p=top_p)
    return _apply_min_p(logits, min_p) if min_p > 0.0 else logits


def _add_bias(logits: Tensor, sampling: SamplingParams) -> None:
    # A draft may have fewer tokens than the target, so what it lacks is skipped.
    pairs = [pair for pair in sampling.logit_bias if pair[0] < logits.shape[1]]
    if pairs:
        token_ids = torch.tensor([pair[0] for pair in pairs], device=logits.device)
        biases = torch.tensor([pair[1] for pair in pairs], dtype=logits.dtype, device=logits.device)
        logits.index_add_(1, token_ids, biases.expand(len(logits), -1))


def _forbid_others(logits: Tensor, sampling: SamplingParams) -> None:
    """Makes tokens impossible that are not among the allowed ones; a draft may lack all of those."""
    allowed = [token_id for token_id in sampling.allowed_token_ids if token_id < logits.shape[1]]
    if allowed:
        is_forbidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        is_forbidden[torch.tensor(allowed, device=logits.device)] = False
        logits.masked_fill_(is_forbidden, -math.inf)


def _forbid_bad_words(logits: Tensor, group: RowGroup) -> None:
    """Makes the last token of a bad word impossible after its others, where that leaves some token."""
    pairs = [pair for pair in bad_ends(group) if pair[1] < logits.shape[1]]
    if not pairs:
        return
    rows, token_ids = (torch.tensor(list(each), device=logits.device) for each in zip(*pairs, strict=True))
    forbidden = logits.clone()
    forbidden[rows, token_ids] = -math.inf
    is_dead = (forbidden == -math.inf).all(-1, keepdim=True)
    logits.copy_(torch.where(is_dead, logits, forbidden))


def _forbid_early_stop(logits: Tensor, group: RowGroup) -> None:
    sampling = group.sampling
    first_allowed = sampling.num_prompt_tokens + sampling.min_tokens
    rows = [row for row, position in enumerate(group.positions) if position < first_allowed]
    stop_ids = [token_id for token_id in sampling.stop_token_ids if token_id < logits.shape[1]]
    if rows and stop_ids:
        logits[
            torch.tensor(rows, device=logits.device)[:, None], torch.tensor(stop_ids, device=logits.device)
        ] = -math.inf


def _forbid_by_grammar(logits: Tensor, masks: NDArray[np.int32]) -> None:
    """Makes tokens impossible whose bit is not set; ids beyond the mask's width stay impossible, too."""
    num_rows, vocab_size = logits.shape
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")[:, :vocab_size]
    assert bits.shape == (num_rows, vocab_size), (bits.shape, logits.shape)
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -math.inf)


def keep_top(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Keeps the ``top_k`` likeliest tokens (0: all), and of them the smallest set that reaches ``top_p``.

    Of equally likely tokens those with lower ids are kept first; at least one token is kept.

    Args:
        logits: ``[num_rows, vocab_size]``, after the temperature.

    Returns:
        A new tensor of the same shape; dropped tokens are -inf.
    """
    vocab_size = logits.shape[1]
    size = min(vocab_size, top_k if top_k > 0 else _FIRST_TOP)
    values = logits.topk(size, dim=-1).values
    if top_p >= 1.0:
        return _keep_first(logits, values, torch.full_like(values[:, :1], size, dtype=torch.int64))
    # The total is that of the tokens which top-k has left.
    total = (values if top_k > 0 else logits).double().logsumexp(-1, keepdim=True)
    reached = (values.double() - total).exp().cumsum(-1)
    if top_k <= 0 and size < vocab_size and bool((reached[:, -1] < top_p).any()):
        values = _sorted_descending(logits)
        reached = (values.double() - total).exp().cumsum(-1)
    num_kept = (reached[:, :-1] < top_p).sum(-1, keepdim=True) + 1
    return _keep_first(logits, values, num_kept)


def _sorted_descending(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        # numpy sorts with vector instructions: 45 microseconds for 4096 tokens, torch 220.
        return torch.from_numpy(np.sort(-logits.numpy(), axis=-1)).neg_()
    return logits.sort(dim=-1, descending=True).values


def _keep_first(logits: Tensor, values: Tensor, num_kept: Tensor) -> Tensor:
    """Keeps each row's ``num_kept`` largest logits.

    Args:
        logits: ``[num_rows, vocab_size]``.
        values: the largest of them, in descending order: ``[num_rows, at least num_kept]``.
        num_kept: ``[num_rows, 1]``, at least 1.
    """
    threshold = values.gather(-1, num_kept - 1)
    is_kept = logits >= threshold
    num_extra = is_kept.sum(-1, keepdim=True) - num_kept
    if bool((num_extra > 0).any()):
        is_tied = logits == threshold
        num_tied_kept = is_tied.sum(-1, keepdim=True) - num_extra
        is_kept &= ~is_tied | (is_tied.cumsum(-1) <= num_tied_kept)
    return logits.masked_fill(~is_kept, -math.inf)


def _apply_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Drops tokens less likely than ``min_p`` times the likeliest."""
    threshold = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < threshold, -math.inf)
