"""The index of the prefix cache: contents of blocks by the tokens they were computed from.

Contents are named in *units* of at most 16 tokens that do not cross blocks::

    block_size 16:  |unit|unit|unit|...         a block is one unit
    block_size 40:  |unit|unit|un|unit|unit|un| ...   the last unit of a block may be shorter

Units are named by ``specray.prefix_keys``. That two different prefixes have one key is out of reach even of
those who choose the prompts (2^128 hashes), so tokens are not compared again.

A block that is full is shared by all sequences with its prefix. A block that is not (on CPU a block holds a
whole sequence, so this is every block there) has one owner who goes on writing after what is known of it;
others copy from it. Only tokens that a router has told, and that have one more such token after them, are
ever named here: an engine computes the last one again for its logits, and draft tokens come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.prefix_keys import UNIT_TOKENS, root_key, unit_key

BARE_ROOT = root_key()
"""The root of sequences whose K/V are the model's own, without a salt."""


class PrefixIndex:
    """The units that each block is known to hold, and the blocks that hold each unit.

    Args:
        block_size: tokens per block, >= 1.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.units_per_block = -(-block_size // UNIT_TOKENS)
        self._holders: dict[bytes, list[int]] = {}
        # Units of a block are known from its first token on, without gaps.
        self._units: dict[int, list[bytes]] = {}

    # Where units lie

    def num_units(self, num_tokens: int) -> int:
        """Whole units among the first ``num_tokens`` tokens of a sequence."""
        num_blocks, rest = divmod(num_tokens, self.block_size)
        return num_blocks * self.units_per_block + rest // UNIT_TOKENS

    def end_of(self, num_units: int) -> int:
        """Tokens in the first ``num_units`` units of a sequence."""
        num_blocks, rest = divmod(num_units, self.units_per_block)
        return num_blocks * self.block_size + rest * UNIT_TOKENS

    def next_key(self, keys: Sequence[bytes], token_ids: Sequence[int], root: bytes = BARE_ROOT) -> bytes:
        """The key of the unit after ``keys`` in the sequence of ``token_ids``, which must reach its end.

        Args:
            root: what stands before the first unit, from ``root_key``.
        """
        first, last = self.end_of(len(keys)), self.end_of(len(keys) + 1)
        assert last <= len(token_ids), (len(token_ids), last)
        return unit_key(keys[-1] if keys else root, token_ids[first:last])

    def ends_unit(self, num_tokens: int) -> bool:
        """Whether a unit ends behind so many tokens of a sequence."""
        return self.end_of(self.num_units(num_tokens)) == num_tokens

    def names(self, keys: Sequence[bytes], step: int) -> list[bytes | None]:
        """Keys behind each multiple of ``step`` tokens within units; None where no unit ends."""
        ends = range(step, self.end_of(len(keys)) + 1, step)
        return [keys[self.num_units(end) - 1] if self.ends_unit(end) else None for end in ends]

    # What blocks hold

    def held(self, block_id: int) -> list[bytes]:
        """Keys of the units that the block is known to hold, in their order."""
        return list(self._units.get(block_id, ()))

    def num_held(self, block_id: int) -> int:
        return len(self._units.get(block_id, ()))

    def holder(self, key: bytes) -> int | None:
        """A block that holds the unit, and with it the units of its prefix that belong into that block."""
        holders = self._holders.get(key)
        return holders[0] if holders else None

    def add(self, block_id: int, key: bytes) -> None:
        """The block holds one more unit, after those that it is known to hold."""
        self._units.setdefault(block_id, []).append(key)
        self._holders.setdefault(key, []).append(block_id)

    def truncate(self, block_id: int, num_units: int) -> None:
        """Forgets all units of the block but the first ``num_units``."""
        units = self._units.get(block_id, [])
        while len(units) > num_units:
            key = units.pop()
            holders = self._holders[key]
            holders.remove(block_id)
            if not holders:
                del self._holders[key]
        if not units:
            self._units.pop(block_id, None)

    def check_integrity(self) -> None:
        """Raises AssertionError when units and holders do not say the same."""
        pairs = {(key, block_id) for block_id, units in self._units.items() for key in units}
        num_pairs = sum(len(units) for units in self._units.values())
        assert len(pairs) == num_pairs, "a block holds a unit twice"
        named = [(key, block_id) for key, holders in self._holders.items() for block_id in holders]
        assert len(named) == num_pairs and set(named) == pairs, "units and their holders differ"
        assert all(self._holders.values()) and all(self._units.values()), "an empty entry was kept"
        assert all(len(units) <= self.units_per_block for units in self._units.values())
