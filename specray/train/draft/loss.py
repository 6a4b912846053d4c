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


@dataclass(frozen=True, slots=True)
class TargetView:
    """The target's distribution over the tokens that a draft can propose, of some rows."""

    log_probs: torch.Tensor
    """``[num_tokens, draft_vocab_size]``, of the whole vocabulary's softmax: they sum to less than one."""
    column: torch.Tensor
    """The draft's column of the target's most likely token, where it has one."""
    is_known: torch.Tensor
    """Whether the draft can propose the target's most likely token."""


def target_view(target_logits: torch.Tensor, draft_ids: torch.Tensor) -> TargetView:
    """What a draft with these ids is compared with.

    Args:
        target_logits: ``[num_tokens, vocab_size]``.
        draft_ids: the target's id of each of the draft's columns, ascending.
    """
    log_probs = target_logits.float().log_softmax(-1)
    best = log_probs.argmax(-1)
    column = torch.searchsorted(draft_ids, best).clamp(max=len(draft_ids) - 1)
    return TargetView(log_probs[:, draft_ids], column, draft_ids[column] == best)


def draft_loss(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    argmax_weight: float,
    overlap_weight: float,
) -> DraftLoss:
    """:func:`view_loss` against the target's own logits, ``[num_tokens, vocab_size]``."""
    view = target_view(target_logits, draft_ids)
    return view_loss(view, draft_logits, weights, argmax_weight=argmax_weight, overlap_weight=overlap_weight)


def view_loss(
    view: TargetView,
    draft_logits: torch.Tensor,
    weights: torch.Tensor,
    *,
    argmax_weight: float,
    overlap_weight: float,
) -> DraftLoss:
    """KL(target || draft), cross-entropy on the target's argmax, and the total variation distance.

    Divergence: Zhou et al., *DistillSpec*, arXiv 2310.08461. The distance is one minus the acceptance, which
    is what speculation needs, but has hardly a gradient while both are far apart: so it joins late.

    Args:
        view: the target's distribution.
        draft_logits: ``[num_tokens, draft_vocab_size]``.
        weights: ``[num_tokens]``.
    """
    draft_log_probs = draft_logits.float().log_softmax(-1)
    probs = view.log_probs.exp()
    divergence = (probs * (view.log_probs - draft_log_probs)).sum(-1)
    surprise = -draft_log_probs.gather(1, view.column[:, None])[:, 0] * view.is_known
    overlap = torch.minimum(probs, draft_log_probs.exp()).sum(-1)
    loss = divergence + argmax_weight * surprise + overlap_weight * (1 - overlap)
    agrees = view.is_known & (draft_logits.argmax(-1) == view.column)
    return DraftLoss(
        loss=(loss * weights).sum(),
        agreement=(agrees * weights).sum().detach(),
        overlap=(overlap * weights).sum().detach(),
        weight=weights.sum(),
    )
