"""What a runner is given, on the leader by a head and on the other ranks by the leader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BranchRow(NamedTuple):
    """One token of a branch, which sees the beginning of its sequence and what its branch has behind it.

    Branches of one sequence share the K/V of what they have in common. Their own lie behind those of the
    sequence, at *places* that count like its positions.
    """

    trunk_len: int
    """The sequence's tokens that it sees: so many from the first on."""
    first_place: int
    """Where its branch begins; it sees the places from there up to its own."""
    place: int
    """Where its K/V are put."""

    @property
    def position(self) -> int:
        """In its branch, which continues the trunk."""
        return self.trunk_len + self.place - self.first_place


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    """New tokens, at least one."""
    start: int
    """Position of the first new token: the number of tokens of the sequence whose K/V are valid."""
    block_ids: Sequence[int]
    """Enough blocks for ``end`` tokens."""
    num_logits: int
    """Logits are wanted for the last so many of ``token_ids``; 0 only fills the cache."""
    branches: Sequence[BranchRow] = ()
    """For tokens of branches, one each, instead of ``start``; their places ascend."""

    @property
    def end(self) -> int:
        """Position, or place, after the last new token."""
        return self.branches[-1].place + 1 if self.branches else self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CopyInput:
    """K/V to copy from one list of blocks to another: of the tokens ``first .. num_tokens - 1`` in them."""

    source_block_ids: Sequence[int]
    destination_block_ids: Sequence[int]
    first: int
    num_tokens: int
