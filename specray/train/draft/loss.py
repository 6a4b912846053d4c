"""The loss of a draft: how far its distribution is from the target's, and how often they would agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from specray.train.draft.loss_kind import LossKind

_ADAPTIVITY = 3.0
"""Factor of the acceptance in the exponent of the divergence's share."""


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the parts of a loss."""

    argmax: float = 0.0
    """Weight of the cross-entropy on the target's most likely token."""
    distance: float = 0.0
    """Weight of the total variation distance, next to the divergence."""
    is_adaptive: bool = False
    """Divergence and distance share a weight of one, as the acceptance has it."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Options of a loss."""

    kind: LossKind = LossKind.KL_TV
    argmax_weight: float = 0.3
    distance_weight: float = 1.0
    """Weight of the distance, of ``KL_TV`` alone."""

    @property
    def held_out(self) -> LossWeights:
        """Weights of a held-out loss, the same all the time."""
        return LossWeights(self.argmax_weight)

    def at(self, progress: float) -> LossWeights:
        """Weights after a share of the run."""
        # Share of a run after which the distance joins the divergence.
        has_distance = self.kind is LossKind.KL_TV and progress >= 0.6
        return LossWeights(
            self.argmax_weight,
            self.distance_weight if has_distance else 0.0,
            is_adaptive=self.kind is LossKind.LK,
        )


@dataclass(slots=True)
class DraftLoss:
    """Sums over tokens, weighted, and the weights' sum: divide to get means."""

    loss: torch.Tensor
    agreement: torch.Tensor
    """Tokens whose argmax is the target's."""
    overlap: torch.Tensor
    """Sum over tokens of ``sum(min(p, q))``: the acceptance of rejection sampling at temperature 1."""
    weight: torch.Tensor
    row_overlaps: torch.Tensor
    """``[num_tokens]``: overlap of each."""


@dataclass(frozen=True, slots=True)
class TargetProbs:
    """The target's distribution over the tokens that a draft can propose, of some rows."""

    log_probs: torch.Tensor
    """``[num_tokens, draft_vocab_size]``, of the whole vocabulary's softmax: they sum to less than one."""
    column: torch.Tensor
    """The draft's column of the target's most likely token, where it has one."""
    is_known: torch.Tensor
    """Whether the draft can propose the target's most likely token."""


def target_view(target_logits: torch.Tensor, draft_ids: torch.Tensor) -> TargetProbs:
    """What a draft with these ids is compared with.

    Args:
        target_logits: ``[num_tokens, vocab_size]``.
        draft_ids: the target's id of each of the draft's columns, ascending.
    """
    log_probs = target_logits.float().log_softmax(-1)
    return view_of(log_probs[:, draft_ids], log_probs.argmax(-1), draft_ids)


def view_of(log_probs: torch.Tensor, best: torch.Tensor, draft_ids: torch.Tensor) -> TargetProbs:
    """The view of rows whose numbers are known.

    Args:
        log_probs: of the draft's tokens, ``[num_tokens, draft_vocab_size]``, as ``TargetProbs`` has them.
        best: the target's most likely token of each row, ``[num_tokens]``.
        draft_ids: the target's id of each of the draft's columns, ascending.
    """
    column = torch.searchsorted(draft_ids, best).clamp(max=len(draft_ids) - 1)
    return TargetProbs(log_probs, column, draft_ids[column] == best)


def draft_loss(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    weights: torch.Tensor,
    parts: LossWeights,
) -> DraftLoss:
    """:func:`view_loss` against the target's own logits, ``[num_tokens, vocab_size]``."""
    return view_loss(target_view(target_logits, draft_ids), draft_logits, weights, parts)


def view_loss(
    view: TargetProbs, draft_logits: torch.Tensor, weights: torch.Tensor, parts: LossWeights
) -> DraftLoss:
    """KL(target || draft), cross-entropy on the target's argmax, and the total variation distance.

    Divergence: Zhou et al., *DistillSpec*, arXiv 2310.08461. The distance is one minus the acceptance, which
    is what speculation needs, but has hardly a gradient while both are far apart. So it joins late, or its
    share follows the mean acceptance: the divergence has ``exp(-3 acceptance)`` (*LK losses*, arXiv
    2602.23881).

    Args:
        view: the target's distribution.
        draft_logits: ``[num_tokens, draft_vocab_size]``.
        weights: ``[num_tokens]``.
    """
    logits = draft_logits.float()
    log_total = logits.logsumexp(-1)
    probs = view.log_probs.exp()
    # sum(p * (log p - log q)), without storing a tensor of all log q for the gradient.
    entropy = (probs * view.log_probs).sum(-1)
    divergence = entropy - (probs * logits).sum(-1) + probs.sum(-1) * log_total
    surprise = (log_total - logits.gather(1, view.column[:, None])[:, 0]) * view.is_known
    # The overlap is always returned, and has a gradient only where it is part of the loss.
    with torch.set_grad_enabled(torch.is_grad_enabled() and (parts.distance > 0 or parts.is_adaptive)):
        overlap = torch.minimum(probs, (logits - log_total[:, None]).exp()).sum(-1)
    overlaps = overlap.detach()
    total, first, second = weights.sum(), 1.0, parts.distance
    if parts.is_adaptive:
        acceptance = float((overlaps * weights).sum() / total.clamp(min=1e-6))
        first = math.exp(-_ADAPTIVITY * acceptance)
        second = 1.0 - first
    loss = first * divergence + parts.argmax * surprise + second * (1 - overlap)
    agrees = view.is_known & (draft_logits.argmax(-1) == view.column)
    return DraftLoss(
        loss=(loss * weights).sum(),
        agreement=(agrees * weights).sum().detach(),
        overlap=(overlaps * weights).sum(),
        weight=total,
        row_overlaps=overlaps,
    )
