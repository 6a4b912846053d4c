"""What engines draw tokens through: one seam over the CPU's way and another device's."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.draft import DraftSampler, DraftToken, RankedRow
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import process_logits, shifts_logits
from specray.engine.sampling.state import RowGroup
from specray.engine.sampling.tree_walk import walk_trees
from specray.engine.sampling.verify import Round, Verified, verify_rounds
from specray.engine.sampling.vocabulary import TrimmedVocabulary

DEFAULT_MAX_NUM_DRAFT_PROBS = 64


class Sampler(Protocol):
    """Draws from unprocessed logits ``[number of rows, vocab_size]``, which it leaves as they are."""

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        """Decides of each sequence how many draft tokens are accepted and which token follows."""
        ...

    def draw(
        self, logits: Tensor, groups: Sequence[RowGroup], *, is_judged: bool = False
    ) -> Sequence[DraftToken | None]:
        """One draft token per row, or None; see ``DraftSampler.draw``."""
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
        vocabulary: what the logits stand for, where they are not of all tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_draft_probs: int = DEFAULT_MAX_NUM_DRAFT_PROBS,
        *,
        vocabulary: TrimmedVocabulary | None = None,
    ) -> None:
        token_ids = None if vocabulary is None else vocabulary.token_ids
        super().__init__(
            NoiseSource(vocab_size, token_ids=token_ids),
            max_num_draft_probs=max_num_draft_probs,
            vocabulary=vocabulary,
        )

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        if all(item.group.parents is None for item in rounds):
            return self._verify_chains(logits, rounds)
        starts = [0, *itertools.accumulate(item.group.num_rows for item in rounds)]
        trees = [index for index, item in enumerate(rounds) if item.group.parents is not None]
        chains = [index for index, item in enumerate(rounds) if item.group.parents is None]
        groups, first_rows = [rounds[index].group for index in trees], [starts[index] for index in trees]
        verified = dict(zip(trees, walk_trees(logits, groups, first_rows, self._noise), strict=True))
        if chains:
            rows = torch.cat([logits[starts[index] : starts[index + 1]] for index in chains])
            of_chains = self._verify_chains(rows, [rounds[index] for index in chains])
            verified.update(zip(chains, of_chains, strict=True))
        return [verified[index] for index in range(len(rounds))]

    def _verify_chains(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        processed = process_logits(logits, [item.group for item in rounds])
        return verify_rounds(processed, rounds, self._noise)


class MappedRows(ABC):
    """Implements :class:`Sampler` through one for other rows, into which it turns the logits.

    Args:
        sampler: draws from the other rows.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @abstractmethod
    def mapped(self, logits: Tensor) -> Tensor:
        """The rows from which the sampler draws."""

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Verified]:
        return self._sampler.verify(self.mapped(logits), rounds)

    def draw(
        self, logits: Tensor, groups: Sequence[RowGroup], *, is_judged: bool = False
    ) -> Sequence[DraftToken | None]:
        return self._sampler.draw(self.mapped(logits), groups, is_judged=is_judged)

    def rank(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        counts: Sequence[int],
        excluded: Sequence[int | None],
    ) -> list[RankedRow]:
        return self._sampler.rank(self.mapped(logits), groups, counts, excluded)


class WholeRows(MappedRows):
    """Implements :class:`Sampler` for logits of some tokens, through one for logits of all.

    Args:
        sampler: draws from rows of all tokens.
        num_token_ids: tokens of a row, without padding after them.
        vocabulary: what the logits stand for, where they are not of all tokens.
    """

    def __init__(self, sampler: Sampler, num_token_ids: int, vocabulary: TrimmedVocabulary | None) -> None:
        super().__init__(sampler)
        self._num_token_ids = num_token_ids
        self._vocabulary = vocabulary

    def draw(
        self, logits: Tensor, groups: Sequence[RowGroup], *, is_judged: bool = False
    ) -> Sequence[DraftToken | None]:
        """None where none of the tokens that the logits are of is possible."""
        whole = self.mapped(logits)
        drawn = self._sampler.draw(whole, groups, is_judged=is_judged)
        if self._vocabulary is None or not any(shifts_logits(group) for group in groups):
            return drawn
        is_dead = (process_logits(whole, groups).amax(-1) == -math.inf).tolist()
        return [None if dead else token for dead, token in zip(is_dead, drawn, strict=True)]

    def mapped(self, logits: Tensor) -> Tensor:
        if self._vocabulary is not None:
            return self._vocabulary.whole(logits)
        return logits[:, : self._num_token_ids].contiguous()


def make_sampler(
    vocab_size: int,
    device: torch.device,
    max_num_draft_probs: int = DEFAULT_MAX_NUM_DRAFT_PROBS,
    *,
    num_token_ids: int | None = None,
    token_ids: NDArray[np.int64] | None = None,
) -> Sampler:
    """The sampler for logits on ``device``.

    Args:
        num_token_ids: token ids up to the tokenizer's last one; None: all.
        token_ids: of the logits, ascending; None: of all tokens.
    """
    vocabulary = None
    if token_ids is not None:
        vocabulary = TrimmedVocabulary(token_ids, vocab_size=vocab_size, device=device)
    num_known = vocab_size if vocabulary is not None else min(vocab_size, num_token_ids or vocab_size)
    if device.type == "cpu":
        return CpuSampler(num_known, max_num_draft_probs, vocabulary=vocabulary)
    from specray.engine.sampling.device.sampler import DeviceSampler
    from specray.engine.sampling.device.select import choose_kernels

    sampler = DeviceSampler(choose_kernels(device), max_num_draft_probs)
    is_whole = vocabulary is None and num_known == vocab_size
    return sampler if is_whole else WholeRows(sampler, num_known, vocabulary)
