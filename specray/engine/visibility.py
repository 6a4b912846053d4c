"""Visibility of rows: each sees a prefix of its sequence, and its ancestors among the rows after that.

A *KV index* counts the tokens of one sequence in its cache, as its block table lists them. A chain's row at
position p sees the KV indices 0..p. Rows of branches and trees share a prefix, and what lies after it is a
matter of ancestors: siblings have the same position, lie side by side, and do not see each other::

    KV index    [0 ......... prefix_len)      [first_index ........ first_index + 64)
                 seen                          seen where the bit of ``ancestors`` is set

Every attention path uses this one type. Its dense form exists inside a step only and never travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_TREE_ROWS = 64
"""Rows after a prefix that one mask covers."""
_ALL_BITS = (1 << MAX_TREE_ROWS) - 1


class Visibility(NamedTuple):
    """What one row sees, itself included: its own bit is the highest of ``ancestors``."""

    prefix_len: int
    """Number of tokens seen from the start of the sequence."""
    first_index: int
    """KV index of the lowest bit of ``ancestors``, at least ``prefix_len``."""
    ancestors: int
    """Mask of at most 64 bits: bit b stands for KV index ``first_index + b``."""

    @property
    def position(self) -> int:
        """Position of the row's token: tokens seen before it. Of a tree, the prefix and the node's depth."""
        return self.prefix_len + self.ancestors.bit_count() - 1

    @property
    def kv_index(self) -> int:
        """KV index of the row itself."""
        return self.first_index + self.ancestors.bit_length() - 1

    @property
    def signed_ancestors(self) -> int:
        """The mask as an int64 with the same bits."""
        return (
            self.ancestors - (1 << MAX_TREE_ROWS) if self.ancestors >> (MAX_TREE_ROWS - 1) else self.ancestors
        )

    @classmethod
    def from_signed(cls, prefix_len: int, first_index: int, signed_ancestors: int) -> Visibility:
        """The inverse of ``signed_ancestors``."""
        return cls(prefix_len, first_index, signed_ancestors & _ALL_BITS)


def branch_visibility(prefix_len: int, first_index: int, num_rows: int) -> Visibility:
    """The last of ``num_rows`` rows that follow each other from ``first_index`` on, after a prefix."""
    assert 1 <= num_rows <= MAX_TREE_ROWS, num_rows
    return Visibility(prefix_len, first_index, (1 << num_rows) - 1)


def tree_visibility(prefix_len: int, parents: Sequence[int]) -> list[Visibility]:
    """One row for each node of a tree that lies after the prefix, in the order of its nodes.

    Args:
        parents: the index of each node's parent, which comes before it; -1: the prefix.
    """
    assert len(parents) <= MAX_TREE_ROWS, len(parents)
    masks: list[int] = []
    for index, parent in enumerate(parents):
        assert -1 <= parent < index, (index, parent)
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << index)
    return [Visibility(prefix_len, prefix_len, mask) for mask in masks]


def is_visible(
    keys: torch.Tensor,
    prefix_lens: torch.Tensor,
    first_indices: torch.Tensor,
    ancestors: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """The dense form: which KV indices each row sees.

    Args:
        keys: KV indices, ``[num_keys]``.
        prefix_lens, first_indices, ancestors: of the rows, integers of one shape; masks are int64.
        window: sliding window: a row sees itself and the ``window - 1`` positions before it.

    Returns:
        Booleans, the rows' shape and ``num_keys`` after it. Only its shape depends on that of the arguments.
    """
    prefix_end = prefix_lens[..., None]
    is_prefix = keys < prefix_end
    if window is not None:
        positions = prefix_end + count_bits(ancestors)[..., None] - 1
        is_prefix = is_prefix & (keys > positions - window)
    bits = keys - first_indices[..., None]
    is_bit = (bits >= 0) & (bits < MAX_TREE_ROWS)
    masks = within_window(ancestors, window)[..., None] >> bits.clamp(0, MAX_TREE_ROWS - 1)
    return is_prefix | (is_bit & (masks & 1).bool())


def within_window(ancestors: torch.Tensor, window: int | None) -> torch.Tensor:
    """Masks (int64) without the ancestors that are ``window`` positions and more before their row."""
    if window is None or window >= MAX_TREE_ROWS:
        return ancestors
    for _ in range(MAX_TREE_ROWS - window):
        # Ancestors are in the order of their depth: the lowest bit is the farthest.
        ancestors = torch.where(count_bits(ancestors) > window, ancestors & (ancestors - 1), ancestors)
    return ancestors


def count_bits(masks: torch.Tensor) -> torch.Tensor:
    """The number of bits set in each int64."""
    pairs = masks - ((masks >> 1) & 0x5555555555555555)
    nibbles = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (octets * 0x0101010101010101) >> 56
