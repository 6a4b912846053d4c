"""The three verification rules: pure functions of processed logits, draft tokens and keyed noise.

Each keeps the target's output distribution exactly. Row j of ``logits`` predicts the token that draft token j
proposes; the last row predicts the bonus token. All rows are *processed* (see ``processors``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.types import SparseProbs


class Verified(NamedTuple):
    """How many draft tokens are kept, and the recovered or bonus token after them."""

    num_accepted_tokens: int
    next_token_id: int


def accept_equal(own_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Verified:
    """Keeps draft tokens while they equal the target's own; the target's own token follows.

    Args:
        own_token_ids: the target's choice in each row; one more than draft tokens.
    """
    assert len(own_token_ids) == len(draft_token_ids) + 1, (len(own_token_ids), len(draft_token_ids))
    num_accepted = 0
    for own, draft in zip(own_token_ids, draft_token_ids, strict=False):
        if own != draft:
            break
        num_accepted += 1
    return Verified(num_accepted, own_token_ids[num_accepted])


def verify_greedy(logits: Tensor, draft_token_ids: Sequence[int]) -> Verified:
    """Accepts while the draft token is the argmax.

    Args:
        logits: ``[num_draft_tokens + 1, vocab_size]``.
    """
    return accept_equal(logits.argmax(-1).tolist(), draft_token_ids)


def draw_coupled(logits: Tensor, noise: Tensor) -> Tensor:
    """Draws from ``softmax(logits)`` with given Gumbel noise (the Gumbel-max trick).

    Args:
        logits: ``[num_rows, vocab_size]``.
        noise: float64, the same shape; the sum is float64, so that ties have no weight.

    Returns:
        int64 ``[num_rows]``.
    """
    return (logits + noise).argmax(-1)


def coupled_keys(seed: int, first_position: int, num_rows: int) -> list[NoiseKey]:
    """The noise rows of consecutive positions, the same for draft and target."""
    return [NoiseKey(seed, first_position + row, Purpose.COUPLED_DRAW) for row in range(num_rows)]


def verify_coupled(
    logits: Tensor,
    draft_token_ids: Sequence[int],
    *,
    noise: NoiseSource,
    seed: int,
    first_position: int,
) -> Verified:
    """Accepts while the draft token equals the target's own draw with position-keyed noise.

    What is committed is always the target's own draw, whatever the draft proposed, so the output does not
    depend on the draft.

    Args:
        logits: ``[num_draft_tokens + 1, vocab_size]``.
        first_position: absolute position of the token that row 0 predicts.
    """
    own = draw_coupled(logits, noise.gumbel(coupled_keys(seed, first_position, len(logits))))
    return accept_equal(own.tolist(), draft_token_ids)


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
    """Draws from unnormalised ``weights`` ``[vocab_size]``; a scale does not change a Gumbel argmax."""
    gumbel = noise.gumbel([NoiseKey(seed, position, Purpose.RESIDUAL_DRAW)])[0]
    return int((weights.log() + gumbel).argmax())
