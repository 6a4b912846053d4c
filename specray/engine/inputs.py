"""Inputs of a runner: from the engine on the leader, and from the leader on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.engine.visibility import Visibility


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    """New tokens, at least one."""
    start: int
    """Position of the first new token: the number of tokens of the sequence whose K/V are valid."""
    block_ids: Sequence[int]
    """Ids of blocks for at least ``end`` tokens."""
    num_logits: int
    """Number of last tokens whose logits are wanted; 0 only fills the cache."""
    visibility: Sequence[Visibility] = ()
    """Visibility of each row, by ascending KV index; empty: the rows are a chain from ``start`` on."""
    state_slot: int = 0
    """Slot of the sequence's states in recurrent layers."""
    num_open: int = 0
    """Last tokens that the sequence may lose again, maybe more than the new ones: recurrent layers keep a
    state before them."""
    marks: Sequence[tuple[int, int]] = ()
    """States that are kept on the way, none behind open tokens: of each its tokens, ascending, and the
    snapshot that it is put into."""
    adapter_slot: int = -1
    """Slot of the sequence's adapter; -1: it has none."""

    @property
    def end(self) -> int:
        """KV index after the last new token."""
        return self.visibility[-1].kv_index + 1 if self.visibility else self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CopyInput:
    """K/V to copy from one list of blocks to another: of the tokens ``first .. num_tokens - 1`` in them."""

    source_block_ids: Sequence[int]
    destination_block_ids: Sequence[int]
    first: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A state to copy between a sequence's slot and a snapshot."""

    slot: int
    snapshot: int
    num_tokens: int
    """Tokens that the snapshot has seen."""
    base: int | None = None
    """Tokens in the slot's state, from which its records lead to the snapshot's. None: the other way: the
    slot gets what the snapshot has."""


@dataclass(frozen=True, slots=True)
class AdapterInput:
    """Something to do with adapters. With a folder: begin to read the adapter in it."""

    folder: str = ""
    digest: bytes = b""
    """What the bytes of the adapter in the folder must be."""
    slot: int = -1
    """Slot that the adapter which was read last is put into."""
    is_cleared: bool = False
    """The slot is emptied instead."""


@dataclass(slots=True)
class Moves:
    """K/V to move between slots of the cache, all of them read before any is written."""

    sources: list[int] = field(default_factory=list)
    """Slots to read."""
    destinations: list[int] = field(default_factory=list)
    """Slot to write, of each."""

    def __bool__(self) -> bool:
        return bool(self.sources)
