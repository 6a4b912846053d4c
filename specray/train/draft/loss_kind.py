"""Names of the losses that a draft can be trained on."""

from __future__ import annotations

from enum import StrEnum


class LossKind(StrEnum):
    """What a draft is trained on; the cross-entropy on the target's most likely token joins each."""

    KL = "kl"
    """Kullback-Leibler divergence from the target's distribution."""
    KL_TV = "kl+tv"
    """The divergence, and in the last two fifths of a run the total variation distance, too."""
    LK = "lk"
    """The divergence turns into the distance by itself, the more is accepted."""
