"""The loss of a draft: how far its distribution is from the target's, and how often they would agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Sums over tokens, weighted, and the weights' sum: divide to get means."""

    loss: torch.Tensor
    agreement: torch.Tensor
    """Tokens whose argmax is the target's."""
    overlap: torch.Tensor
    """Sum over tokens of ``sum(min(p, q))``: the acceptance of rejection sampling at temperature 1."""
    weight: torch.Tensor


def draft_loss(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    argmax_weight: float,
    overlap_weight: float,
) -> DraftLoss:
    """KL(target || draft), cross-entropy on the target's argmax, and the total variation distance.

    Divergence: Zhou et al., *DistillSpec*, arXiv 2310.08461. The distance is one minus the acceptance, which
    is what speculation needs, but has hardly a gradient while both are far apart: so it joins late.

    Args:
        target_logits: ``[num_tokens, vocab_size]``.
        draft_logits: ``[num_tokens, draft_vocab_size]``.
        draft_ids: the target's id of each of the draft's columns, ascending.
        weights: ``[num_tokens]``.
    """
    target_log_probs = target_logits.float().log_softmax(-1)
    best = target_log_probs.argmax(-1)
    kept = target_log_probs[:, draft_ids]
    draft_log_probs = draft_logits.float().log_softmax(-1)
    probs = kept.exp()
    divergence = (probs * (kept - draft_log_probs)).sum(-1)
    column = torch.searchsorted(draft_ids, best).clamp(max=len(draft_ids) - 1)
    is_known = draft_ids[column] == best
    surprise = -draft_log_probs.gather(1, column[:, None])[:, 0] * is_known
    overlap = torch.minimum(probs, draft_log_probs.exp()).sum(-1)
    loss = divergence + argmax_weight * surprise + overlap_weight * (1 - overlap)
    agrees = is_known & (draft_logits.argmax(-1) == column)
    return DraftLoss(
        loss=(loss * weights).sum(),
        agreement=(agrees * weights).sum().detach(),
        overlap=(overlap * weights).sum().detach(),
        weight=weights.sum(),
    )
