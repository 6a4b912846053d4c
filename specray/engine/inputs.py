"""What a runner is given, on the leader by a head and on the other ranks by the leader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    """New tokens, at least one."""
    start: int
    """Position of the first new token: the number of tokens of the sequence whose K/V are valid."""
    block_ids: Sequence[int]
    """Enough blocks for ``start + len(token_ids)`` tokens."""
    num_logits: int
    """Logits are wanted for the last so many of ``token_ids``; 0 only fills the cache."""


@dataclass(frozen=True, slots=True)
class CopyInput:
    """K/V to copy from one list of blocks to another: of the tokens ``first .. num_tokens - 1`` in them."""

    source_block_ids: Sequence[int]
    destination_block_ids: Sequence[int]
    first: int
    num_tokens: int
