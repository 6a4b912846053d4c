"""Decides how many draft tokens are accepted, and which token follows, by one of three rules.

Each keeps the target's output distribution exactly. Greedy and coupled verification accept a draft token
while it is the target's own choice, which for coupled rows has noise keyed by position in it: their output
does not depend on the draft. Rejection verification weighs the distributions of both.

Row j of a chain's ``logits`` predicts the token that draft token j proposes; the last row predicts the bonus
token. Of a tree, row 0 predicts the root's children, and row j + 1 those of node j: a walk goes from child to
child, as long as one is the target's own choice. Nodes of one depth have one position, and so the same noise.
All rows are *processed* (see ``processors``).

Under rejection, a tree's tokens must have been chosen without randomness. Then its walk is exact, too: to
test one child after the other, each with the target's probability of it among the tokens that are left, comes
to the same as to draw the target's own token first and to look which child it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.draft_tokens import SparseProbs, walk
from specray.engine.sampling.draws import add_noise, draw_tokens, draw_weighted
from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.engine.sampling.state import RowGroup


class Verified(NamedTuple):
    """How many draft tokens are kept, and the recovered or bonus token after them."""

    num_accepted_tokens: int
    next_token_id: int
    last_node: int | None = None
    """Index of the last node that is kept of a tree; None: of a chain, or none is."""


def accept_own(own_token_ids: Sequence[int], group: RowGroup) -> Verified:
    """Keeps draft tokens, of a chain or a tree, while they equal the target's choice in their row."""
    if group.parents is None:
        return accept_equal(own_token_ids, group.token_ids)
    last = walk(group.token_ids, group.parents, lambda node: own_token_ids[node + 1])
    if last < 0:
        return Verified(0, own_token_ids[0])
    return Verified(len(group.path(last + 1)), own_token_ids[last + 1], last)


def accept_equal(own_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Verified:
    """Keeps draft tokens while they equal the target's own, of which there is one more."""
    assert len(own_token_ids) == len(draft_token_ids) + 1, (len(own_token_ids), len(draft_token_ids))
    num_accepted = 0
    for own, draft in zip(own_token_ids, draft_token_ids, strict=False):
        if own != draft:
            break
        num_accepted += 1
    return Verified(num_accepted, own_token_ids[num_accepted])


def add_draw_noise(
    logits: Tensor,
    groups: Sequence[RowGroup],
    noise: NoiseSource,
    *,
    rejection_purpose: Purpose | None = None,
) -> Tensor:
    """Adds to each row the Gumbel noise of its rule, so that the argmax is a draw (the Gumbel-max trick).

    Greedy rows get none. The sum is float64, so that ties have no weight.

    Args:
        logits: processed, ``[sum of num_rows, vocab_size]``; left unchanged.
        rejection_purpose: noise for chains under rejection verification; None leaves them without.
    """
    keys = [key for group in groups for key in draw_keys(group, rejection_purpose)]
    return add_noise(logits, keys, noise)


def draw_keys(group: RowGroup, rejection_purpose: Purpose | None = None) -> list[NoiseKey | None]:
    """Returns for each row the key of its noise, or None; as for ``add_draw_noise``."""
    sampling = group.sampling
    purpose: Purpose | None = Purpose.COUPLED_DRAW
    if sampling.draws_by_rejection:
        purpose = rejection_purpose if group.parents is None else Purpose.RESIDUAL_DRAW
    if sampling.is_greedy or purpose is None:
        return [None] * group.num_rows
    return [NoiseKey(sampling.seed, position, purpose) for position in group.positions]


def verify_rejection(
    logits: Tensor,
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[SparseProbs],
    *,
    noise: NoiseSource,
    seed: int,
    first_position: int,
) -> Verified:
    """Accepts with probability ``min(1, target_prob / draft_prob)``, else samples the residual.

    Leviathan, Kalman, Matias: *Fast inference from transformers via speculative decoding*, ICML 2023;
    Chen et al.: *Accelerating large language model decoding with speculative sampling*, 2023.

    A draft token must be a sample of its ``draft_probs``, drawn with noise that is used nowhere here. Without
    ``draft_probs`` it counts as chosen with certainty (one-hot), which is right for a token chosen without
    randomness. A token that its draft distribution cannot produce is rejected.

    Args:
        logits: ``[num_draft_tokens + 1, vocab_size]``.
        draft_probs: one per draft token, or empty.
        first_position: absolute position of the token that row 0 predicts.
    """
    assert len(logits) == len(draft_token_ids) + 1, (len(logits), len(draft_token_ids))
    probs = draft_probs or [SparseProbs((token_id,), (1.0,)) for token_id in draft_token_ids]
    target_probs = logits.double().softmax(-1)
    for index, (token_id, draft) in enumerate(zip(draft_token_ids, probs, strict=True)):
        position = first_position + index
        draft_row = _dense(draft, target_probs[index])
        uniform = noise.uniform(NoiseKey(seed, position, Purpose.ACCEPT_TEST))
        draft_prob, target_prob = draft_row[token_id].item(), target_probs[index, token_id].item()
        if not (draft_prob > 0.0 and uniform * draft_prob < target_prob):
            residual = _residual(target_probs[index], draft_row)
            return Verified(index, _draw_residual(residual, noise, seed, position))
    last = len(draft_token_ids)
    return Verified(last, _draw_residual(target_probs[last], noise, seed, first_position + last))


def _dense(sparse: SparseProbs, like: Tensor) -> Tensor:
    """The draft's distribution as a row ``[vocab_size]``, normalised as the draft sampled from it."""
    row = torch.zeros_like(like)
    values = torch.tensor(sparse.probs, dtype=row.dtype, device=row.device)
    row[list(sparse.token_ids)] = values / values.sum()
    return row


def _residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    # Equal distributions reject only by rounding, and then leave nothing.
    return residual if bool(residual.sum() > 0.0) else target_probs


def _draw_residual(weights: Tensor, noise: NoiseSource, seed: int, position: int) -> int:
    """Draws from unnormalised ``weights`` ``[vocab_size]``."""
    return draw_weighted(weights, NoiseKey(seed, position, Purpose.RESIDUAL_DRAW), noise)


class Round(NamedTuple):
    """One sequence's part of a batch to verify."""

    group: RowGroup
    """Rows of the draft tokens and one more."""
    draft_token_ids: Sequence[int]
    draft_probs: Sequence[SparseProbs]
    """Distributions of the draft tokens; none of a tree."""


def verify_rounds(logits: Tensor, rounds: Sequence[Round], noise: NoiseSource) -> list[Verified]:
    """Verifies a batch, each sequence by its own rule; greedy and coupled rows are drawn together.

    Args:
        logits: processed, ``[sum of num_rows, vocab_size]``.
    """
    keys = [key for item in rounds for key in draw_keys(item.group)]
    own = [draw.token_id for draw in draw_tokens(logits, keys, noise)]
    verified, start = [], 0
    for group, draft_token_ids, draft_probs in rounds:
        end = start + group.num_rows
        if group.is_tested:
            verified.append(
                verify_rejection(
                    logits[start:end],
                    draft_token_ids,
                    draft_probs,
                    noise=noise,
                    seed=group.sampling.seed,
                    first_position=group.first_position,
                )
            )
        else:
            verified.append(accept_own(own[start:end], group))
        start = end
    return verified
