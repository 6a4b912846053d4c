"""What engines draw tokens through: one seam, behind it the CPU's way or that of another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specray.engine.sampling.draft import DraftSampler, DraftToken, RankedRow
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.state import RowGroup
from specray.engine.sampling.verify import Round, Verified, verify_rounds

DEFAULT_MAX_NUM_DRAFT_PROBS = 64


class Sampler(Protocol):
    """Draws from unprocessed logits ``[number of rows, vocab_size]``, which it leaves as they are."""

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        """Decides of each sequence how many draft tokens are accepted and which token follows."""
        ...

    def draw(
        self, logits: Tensor, groups: Sequence[RowGroup], *, is_judged: bool = False
    ) -> list[DraftToken]:
        """One draft token per row; see ``DraftSampler.draw``."""
        ...

    def rank(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        counts: Sequence[int],
        excluded: Sequence[int | None],
    ) -> list[RankedRow]:
        """The tokens that the target is likeliest to draw at each row; see ``DraftSampler.rank``."""
        ...


class CpuSampler(DraftSampler):
    """Implements :class:`Sampler` for logits on the CPU; the definition of what any other one draws.

    Args:
        max_num_draft_probs: support of the truncated distribution under rejection verification.
    """

    def __init__(self, vocab_size: int, max_num_draft_probs: int = DEFAULT_MAX_NUM_DRAFT_PROBS) -> None:
        super().__init__(NoiseSource(vocab_size), max_num_draft_probs=max_num_draft_probs)

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        """See :class:`Sampler`."""
        processed = process_logits(logits, [item.group for item in rounds])
        return verify_rounds(processed, rounds, self._noise)


def make_sampler(
    vocab_size: int, device: torch.device, max_num_draft_probs: int = DEFAULT_MAX_NUM_DRAFT_PROBS
) -> Sampler:
    """The sampler for logits on ``device``."""
    if device.type == "cpu":
        return CpuSampler(vocab_size, max_num_draft_probs)
    from specray.engine.sampling.device.sampler import DeviceSampler
    from specray.engine.sampling.device.select import choose_kernels

    return DeviceSampler(choose_kernels(device), max_num_draft_probs)
