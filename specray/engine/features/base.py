"""What a drafter that reads the target's features is to the engine, and what the target is to a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.attention.sdpa import sequence_slots
from specray.engine.cache.blocks import BlockCache
from specray.engine.model.operators import Operators
from specray.engine.step import CacheShape
from specray.engine.visibility import Visibility

if TYPE_CHECKING:
    from specray.engine.features.layout import DrafterLayout

TokenRows = Callable[[torch.Tensor], torch.Tensor]
"""Token ids ``[num_rows]`` to embeddings, or hidden states ``[num_rows, hidden_size]`` to float32 logits."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of the target that a drafter has to fit."""

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a drafter takes from the loaded target."""

    shape: TargetShape
    embed: TokenRows
    logits: TokenRows
    """The target's head, of rows after its final norm."""
    operators: Operators
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    num_blocks: int
    """Blocks of the target's cache; a drafter's K/V and features lie in blocks of the same ids."""
    block_size: int
    token_ids: NDArray[np.int64] | None = None
    """Token ids of the logits, ascending; None: all."""

    def cache(self, shape: CacheShape) -> BlockCache:
        """Memory for a drafter's own K/V."""
        return BlockCache(
            shape,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )


@dataclass(frozen=True, slots=True)
class Context:
    """A sequence that is drafted for."""

    token_ids: Sequence[int]
    """All of its tokens; the last one is drawn, and not computed by the target."""
    block_ids: Sequence[int]
    """Blocks for its tokens, and for all but the last of its draft tokens."""
    num_valid: int
    """First tokens whose part of the drafter's own state is there."""
    num_wanted: int = 1
    """Most draft tokens of a path."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Draft tokens of one sequence that are computed next: of a chain one, of a tree those of one depth."""

    context: Context
    token_ids: Sequence[int]
    sources: Sequence[int]
    """Row of the step before from which each token was drawn."""
    visibility: Sequence[Visibility]
    """What each token sees, after the context's tokens; KV indices ascending."""

    @property
    def is_chain(self) -> bool:
        return len(self.visibility) == 1 and self.visibility[0].kv_index == self.visibility[0].position


class FeatureStore:
    """Fused features of every token that the target has computed, at the token's slot.

    They depend on the token and those before it alone, as K/V do, so sequences share them as they share
    blocks, and a prefix that is found in the cache needs no further forward of the target.
    """

    def __init__(self, num_blocks: int, block_size: int, size: int, *, like: torch.Tensor) -> None:
        self.block_size = block_size
        # Of the CPU's memory, pages that are never written are never had.
        self.rows = like.new_empty(num_blocks * block_size, size)

    def write(self, slots: slice | torch.Tensor, features: torch.Tensor) -> None:
        """Stores features ``[num_rows, size]``."""
        self.rows[slots] = features

    def write_tokens(self, block_ids: Sequence[int], first: int, features: torch.Tensor) -> None:
        """Stores features of consecutive tokens of a sequence, from the token ``first`` on."""
        end = first + len(features)
        self.write(sequence_slots(block_ids, first, end, self.block_size, self.rows.device), features)

    def read_tokens(self, block_ids: Sequence[int], first: int, end: int) -> torch.Tensor:
        """Features of the tokens ``first..end - 1`` of a sequence."""
        return self.rows[sequence_slots(block_ids, first, end, self.block_size, self.rows.device)]

    def copy(self, sources: slice | torch.Tensor, destinations: slice | torch.Tensor) -> None:
        self.rows[destinations] = self.rows[sources].clone()


class Placed(Protocol):
    """Where the tensors of a drafter go."""

    @property
    def operators(self) -> Operators:
        """What its linear layers and norms are made of."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Implements :class:`Placed`."""

    operators: Operators
    dtype: torch.dtype
    device: torch.device


class Fuser(Protocol):
    """Makes what is stored of a token out of its features."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target that it reads, as ``step.ForwardOutput`` numbers them."""
        ...

    @property
    def feature_size(self) -> int:
        """Numbers that are stored of each token."""
        ...

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What is stored of the features of some rows, ``[num_rows, feature_size]``."""
        ...


class LastHidden:
    """Implements :class:`Fuser` for drafters that read what the target's head reads: Medusa, MTP layers."""

    def __init__(self, layout: DrafterLayout, parts: Placed) -> None:
        self.feature_layers, self.feature_size = layout.feature_layers, layout.feature_size
        self._dtype = parts.dtype

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return features[self.feature_layers[0]].to(self._dtype)


class FeatureDrafter(ABC):
    """Implements :class:`Fuser`. Drafts for many sequences side by side; not for two threads at once.

    Args:
        fuser: makes what it reads.
    """

    num_unread = 0
    """Last tokens of a context of which no state is kept, and which ``Context.num_valid`` leaves out."""
    keeps_state = True
    """Whether all tokens of a context are read, and K/V of them kept."""
    max_draft_tokens: int | None = None
    """Most draft tokens of a chain, or of a path; None: any number."""
    token_ids: NDArray[np.int64] | None = None
    """Token ids of its logits, ascending; None: all of the target's vocabulary."""
    rank_acceptance: tuple[tuple[float, ...], ...] = ()
    """By depth, the chance that the target draws the best, the second best ... of its row; empty: the scores
    of each row say it."""

    def __init__(self, fuser: Fuser) -> None:
        self._fuser = fuser
        self.feature_layers, self.feature_size = fuser.feature_layers, fuser.feature_size

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self._fuser.fuse(features)

    @abstractmethod
    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        """Catches up with what the target has accepted; float32 logits of each first draft token."""

    @abstractmethod
    def read(self, store: FeatureStore, context: Context) -> None:
        """Catches up with a sequence's tokens and draws nothing, so that what is drawn next begins sooner."""

    @abstractmethod
    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        """Logits of the next draft tokens, a row for each token that is computed."""

    def acceptance(self) -> list[float] | None:
        """Chance, for each row of the last logits, that the target draws what is drawn from it; None: the
        scores of each row say it."""
        return None
