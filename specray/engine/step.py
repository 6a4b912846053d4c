"""What a forward pass is given: the rows of one step, and the shapes of a model.

These types are shared by runners, forwards and attention, so this file imports none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specray.engine.runner.inputs import BranchRow

Slots = slice | torch.Tensor
"""Slots of the cache: a slice, or an int64 tensor ``[num_tokens]``."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        """Factor on the dot products."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps per token on this rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KVCache(Protocol):
    """What attention needs of ``cache.blocks.BlockCache``, where the tensors are described."""

    @property
    def block_size(self) -> int: ...

    @property
    def layers(self) -> Sequence[torch.Tensor]: ...

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...

    def write(self, layer: int, slots: Slots, keys_values: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a step."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row; of branches, the lowest position."""
    block_ids: Sequence[int]
    branches: Sequence[BranchRow] = ()
    """One for each row, their places ascending; none: the rows follow each other from ``start`` on."""

    @property
    def end(self) -> int:
        """Position, or place, after the last row."""
        return self.branches[-1].place + 1 if self.branches else self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """The rows of a step on the device; int32 but for the slots. Rows at the end may belong to nobody."""

    first_rows: (
        torch.Tensor
    )  # [num_sequences + 1]: sequence i has the rows first_rows[i]..first_rows[i + 1] - 1
    lengths: torch.Tensor  # [num_sequences]: places that are valid once the step has written
    block_tables: torch.Tensor  # [num_sequences, max_num_blocks]
    slots: torch.Tensor  # [num_rows], int64: where each row is put
    positions: torch.Tensor  # [num_rows]
    trunk_lens: torch.Tensor  # [num_rows]
    first_places: torch.Tensor  # [num_rows]
    max_rows: int
    """Most rows of one sequence."""
    has_branches: bool
    """False: ``trunk_lens`` and ``first_places`` are zero, and a sequence's rows are its last."""

    @property
    def places(self) -> torch.Tensor:
        """``[num_rows]``: each row's own, up to which it sees."""
        return self.positions - self.trunk_lens + self.first_places


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Where the rows of one step are written, and what each sequence may see.

    Each sequence must hold blocks for ``rows.end`` tokens.
    """

    rows: tuple[SequenceRows, ...]
    cache: KVCache
    batch: BlockBatch | None = None
    """The same as tensors of a fixed shape, where a captured forward reads them; ``rows`` are empty then."""


@dataclass(frozen=True, slots=True)
class Step:
    """One ragged forward: the new tokens of all sequences, one after the other."""

    token_ids: torch.Tensor  # [num_rows], int64
    positions: Slots  # of each row in its sequence; a slice for a single sequence
    attention: AttentionStep
    logit_rows: Slots | None  # the rows whose logits are wanted, in order; None: all


class Forward(Protocol):
    """A model's forward pass over the block cache."""

    @property
    def name(self) -> str:
        """``lowered`` or ``generic``."""
        ...

    @property
    def cache_shape(self) -> CacheShape: ...

    def __call__(self, step: Step) -> torch.Tensor:
        """Fills the cache and returns the logits ``[number of logit_rows, vocab_size]``, float32."""
        ...
