"""Where keys and values live: who owns which block, and the tensors behind the blocks.

A *slot* is one token's place: ``block_id * block_size + offset``. Truncating a sequence frees whole tail
blocks and nothing else; stale slots are overwritten before anything attends to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from specray.errors import OutOfBlocksError

_ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector register."""


class BlockAllocator:
    """Hands out block ids ``0..num_blocks - 1``; lowest ids first, then the last freed.

    Args:
        num_blocks: blocks in the cache, >= 1.
        block_size: tokens per block, >= 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        assert count >= 0, count
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} cache blocks of {self.block_size} tokens are needed, {len(self._free)} of "
                f"{self.num_blocks} are free"
            )
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._is_used[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back. Freeing a block that is not in use is a bug of the caller; nothing changes."""
        ids = list(block_ids)
        assert len(set(ids)) == len(ids), f"blocks freed twice in one call: {ids}"
        for block_id in ids:
            assert 0 <= block_id < self.num_blocks and self._is_used[block_id], (
                f"block {block_id} is not in use"
            )
        for block_id in ids:
            self._is_used[block_id] = 0
        self._free.extend(ids)

    def check_integrity(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Recomputes everything from scratch.

        Args:
            tables: every live table; when given, each used block must belong to exactly one of them.

        Raises:
            AssertionError: a block is free twice, free and used, lost, or not owned by exactly one table.
        """
        free = set(self._free)
        used = {block_id for block_id in range(self.num_blocks) if self._is_used[block_id]}
        assert len(free) == len(self._free), f"blocks are free twice: {sorted(self._free)}"
        assert not free & used, f"blocks are free and in use: {sorted(free & used)}"
        assert free | used == set(range(self.num_blocks)), (
            "blocks are neither free nor in use, or do not exist"
        )
        if tables is None:
            return
        owned = [block_id for table in tables for block_id in table.block_ids]
        assert len(set(owned)) == len(owned), f"blocks belong to two sequences: {sorted(owned)}"
        assert set(owned) == used, (
            f"used blocks {sorted(used)} are not those of the sequences {sorted(owned)}"
        )


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    __slots__ = ("_allocator", "block_ids")

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self.block_ids: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held now."""
        return len(self.block_ids) * self._allocator.block_size

    def reserve(self, num_tokens: int) -> None:
        """Grows until ``num_tokens`` tokens fit; never shrinks.

        Raises:
            OutOfBlocksError: no room; nothing was changed.
        """
        missing = self._allocator.num_blocks_for(num_tokens) - len(self.block_ids)
        if missing > 0:
            self.block_ids.extend(self._allocator.allocate(missing))

    def truncate(self, num_tokens: int) -> None:
        """Frees the whole tail blocks that the first ``num_tokens`` tokens do not touch; never grows."""
        assert num_tokens >= 0, num_tokens
        keep = self._allocator.num_blocks_for(num_tokens)
        if keep < len(self.block_ids):
            tail = self.block_ids[keep:]
            del self.block_ids[keep:]
            self._allocator.free(tail)

    def release(self) -> None:
        """Frees everything; idempotent."""
        self.truncate(0)


class BlockCache:
    """The K/V tensors of all layers.

    ``layers``: ``[num_blocks * block_size, 2 * num_kv_heads, head_dim]`` each, a slot's keys before its
    values, so that both are written at once; ``keys`` and ``values`` are views of the halves as attention
    wants them, ``[num_kv_heads, 1, num_slots, head_dim]``. Consecutive slots are consecutive in memory, so
    the tokens of a sequence whose blocks are consecutive are one view.
    On CPU the allocation is virtual until it is written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * block_size, 2 * num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, not garbage: a masked slot has weight 0, and 0 times a stray NaN would still be NaN.
        self.layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        by_head = [layer.transpose(0, 1).unsqueeze(1) for layer in self.layers]
        self.keys = [heads[:num_kv_heads] for heads in by_head]
        self.values = [heads[num_kv_heads:] for heads in by_head]

    def write(self, layer: int, slots: slice | torch.Tensor, keys_values: torch.Tensor) -> None:
        """Stores keys and values ``[num_tokens, 2 * num_kv_heads, head_dim]`` at ``slots``.

        Args:
            slots: a slice, or an index tensor ``[num_tokens]``, of slots.
        """
        if isinstance(slots, slice):
            self.layers[layer].narrow(0, slots.start, slots.stop - slots.start).copy_(keys_values)
        else:
            self.layers[layer].index_copy_(0, slots, keys_values)

    def copy(self, source: slice | torch.Tensor, destination: slice | torch.Tensor) -> None:
        """Copies the K/V of ``source`` slots to ``destination`` slots of the same number, in every layer."""
        for tensor in self.layers:
            tensor[destination] = tensor[source].clone()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page of the cache at start; numpy asks the system for pages that are zero.
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
