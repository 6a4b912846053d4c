"""The prefix cache of one sequence: what it publishes, and what it adopts from others.

Units of a sequence, with its blocks below (block size of two units)::

    units     | 0 | 1 | 2 | 3 | 4 | 5 |
    known     [0 ............. known_len)           published, or found: never written again
    found         [start ................. length)  known of others, about to be adopted
    blocks    |   own or  |   shared   | copied into an own block, or its free holder is taken over |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specray.engine.cache.blocks import BlockTable
from specray.engine.cache.prefix import BARE_ROOT


class CopyTokens(Protocol):
    """Copies K/V of the tokens ``first .. num_tokens - 1`` between two lists of blocks."""

    def __call__(
        self,
        source_block_ids: Sequence[int],
        destination_block_ids: Sequence[int],
        num_tokens: int,
        *,
        first: int = 0,
    ) -> None: ...


class Found(NamedTuple):
    """A known prefix that is longer than what a sequence has computed."""

    start: int
    """Tokens that the sequence has computed itself."""
    length: int
    """Tokens of the known prefix."""
    keys: list[bytes]
    """Keys of all the prefix's units."""


class SequencePrefix:
    """The known units of one sequence. Its block table must belong to an allocator with an index.

    Args:
        table: the sequence's blocks.
        root: from ``prefix_keys.root_key``: units are shared with sequences of the same root only.
    """

    __slots__ = ("_index", "_keys", "_root", "_table", "known_len", "next_len")

    def __init__(self, table: BlockTable, root: bytes = BARE_ROOT) -> None:
        index = table.allocator.index
        assert index is not None, "without an index nothing is known"
        self._index = index
        self._table = table
        self._root = root
        self._set_keys([])

    @property
    def keys(self) -> Sequence[bytes]:
        return self._keys

    def publish(self, token_ids: Sequence[int], limit: int) -> None:
        """Makes known the units that end within the first ``limit`` tokens, committed and computed."""
        if limit < self.next_len:
            return
        index, keys = self._index, self._keys
        while index.end_of(len(keys) + 1) <= limit:
            key = index.next_key(keys, token_ids, self._root)
            index.add(self._table.block_ids[len(keys) // index.units_per_block], key)
            keys.append(key)
        self._set_keys(keys)

    def withdraw(self, position: int) -> int:
        """Forgets what is known here of the tokens from ``position`` on, before they become others.

        Blocks after that of ``position`` are given back, with what they hold. One that others have too is
        not written: its tokens must be computed again elsewhere.

        Returns:
            The number of tokens that stay computed, at most ``position``.
        """
        if position >= self.known_len:
            return position
        index, table = self._index, self._table
        num_units = index.num_units(position)
        block, num_kept = divmod(num_units, index.units_per_block)
        if table.allocator.num_owners(table.block_ids[block]) > 1:
            self._set_keys(self._keys[: num_units - num_kept])
            table.replace(block, ())
            return self.known_len
        self._set_keys(self._keys[:num_units])
        table.replace(block + 1, ())
        index.truncate(table.block_ids[block], num_kept)
        return position

    def leave(self) -> int:
        """Gives all blocks back, with what they hold; returns 0, the number of tokens that stay computed."""
        self._table.replace(0, ())
        self._set_keys([])
        return 0

    def find(self, token_ids: Sequence[int], start: int, limit: int) -> Found | None:
        """Looks for a known prefix of ``token_ids`` longer than ``start`` tokens, at most ``limit`` long."""
        index, keys = self._index, list(self._keys)
        while index.end_of(len(keys) + 1) <= limit:
            key = index.next_key(keys, token_ids, self._root)
            if index.holder(key) is None:
                break
            keys.append(key)
        length = index.end_of(len(keys))
        return Found(start, length, keys) if length > start else None

    def adopt(
        self,
        found: Found,
        num_tokens: int,
        allocate: Callable[[int], list[int]],
        copy_tokens: CopyTokens,
    ) -> None:
        """Takes over what was found, and room for ``num_tokens`` tokens, at least one more than that.

        Full blocks are shared. The tokens after them are copied, or the block that has them is taken over
        when it is free and either holds nothing else or would be the next to be forgotten.

        Raises:
            OutOfBlocksError: no room; nothing was changed.
        """
        allocator, index, table = self._table.allocator, self._index, self._table
        num_full, num_rest = divmod(len(found.keys), index.units_per_block)
        shared = [self._holder(found, block) for block in range(found.start // index.block_size, num_full)]
        num_own = num_full - len(shared) if shared else len(table.block_ids)
        num_needed = allocator.num_blocks_for(num_tokens) - num_own - len(shared)
        allocator.share(shared)
        source = self._holder(found, num_full) if num_rest else None
        has_place = num_own > num_full
        takes_over = source is not None and not has_place and self._may_take(source, num_rest, num_needed)
        pinned = [] if source is None else [source]
        allocator.share(pinned)
        try:
            fresh = allocate(max(0, num_needed - takes_over))
        except BaseException:
            allocator.free([*shared, *pinned])
            raise
        table.replace(num_own, [*shared, *(pinned if takes_over else ()), *fresh])
        if source is not None and takes_over:
            index.truncate(source, num_rest)
        elif source is not None:
            self._copy(found, source, num_full, copy_tokens)
            allocator.free(pinned)
        self._set_keys(found.keys)

    def _copy(self, found: Found, source: int, block: int, copy_tokens: CopyTokens) -> None:
        """Copies what the sequence lacks of one block, and makes it known in its new place too."""
        index, destination = self._index, self._table.block_ids[block]
        first = block * index.block_size
        copy_tokens([source], [destination], found.length - first, first=max(0, found.start - first))
        for key in found.keys[max(len(self._keys), block * index.units_per_block) :]:
            index.add(destination, key)

    def _may_take(self, block_id: int, num_units: int, num_needed: int) -> bool:
        """A free block gives way when nothing is lost by it, or nothing more than by any other way."""
        allocator = self._table.allocator
        if allocator.num_owners(block_id):
            return False
        holds_no_more = self._index.num_held(block_id) == num_units
        return holds_no_more or allocator.next_evicted == block_id or allocator.num_free <= num_needed

    def _holder(self, found: Found, block: int) -> int:
        """Who has the last unit found of a block has all of it before."""
        last = min(len(found.keys), (block + 1) * self._index.units_per_block)
        block_id = self._index.holder(found.keys[last - 1])
        assert block_id is not None, "what was found is still there"
        return block_id

    def check_integrity(self, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Raises AssertionError when what is known of the sequence is not what its blocks hold."""
        index, keys = self._index, self._keys
        assert self.known_len == index.end_of(len(keys)) <= num_computed_tokens, (len(keys), self.known_len)
        for count in range(len(keys)):
            assert index.next_key(keys[:count], token_ids, self._root) == keys[count], (
                f"unit {count} is another"
            )
        for number, block_id in enumerate(self._table.block_ids):
            first = number * index.units_per_block
            assert index.held(block_id) == keys[first : first + index.units_per_block], (
                f"block {block_id} holds other units than those of its sequence"
            )

    def _set_keys(self, keys: list[bytes]) -> None:
        self._keys = keys
        self.known_len = self._index.end_of(len(keys))
        self.next_len = self._index.end_of(len(keys) + 1)
