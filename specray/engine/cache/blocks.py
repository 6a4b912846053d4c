"""The block cache: which sequence owns which block, and the K/V tensors of the blocks.

A *slot* is one token's place: ``block_id * block_size + offset``. Truncating a sequence frees whole tail
blocks and nothing else; stale slots are overwritten before anything attends to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch

from specray.engine.cache.prefix import PrefixIndex
from specray.engine.cache.state_pool import StatePool
from specray.engine.cache.state_slots import MAX_OPEN_ROWS
from specray.engine.cpu.huge_pages import HUGE_PAGE
from specray.engine.step import CacheShape, LayerShape
from specray.errors import OutOfBlocksError

_MADV_POPULATE_WRITE = 23
"""Linux's code for madvise; Python does not name it."""
_PIECE = 4 * HUGE_PAGE
"""Bytes populated at once: whoever changes the process's memory waits for them."""
_LOWEST = 19
_POPULATED_AFTER_S = 10.0
"""Seconds after a start before anything is populated: to find memory takes cores that the first answer needs,
and seconds for a GiB on a virtual machine."""


class BlockAllocator:
    """Hands out block ids ``0..num_blocks - 1``, counts their owners, and knows what free ones still hold.

    A free block is *blank*, or it holds a known prefix and waits to be used again. Blank ones are taken
    first, lowest ids first, then the last freed; then those that have waited longest.

    Args:
        num_blocks: blocks in the cache, >= 1.
        block_size: tokens per block, >= 1.
        index: what blocks hold; None: nothing is used again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        index: PrefixIndex | None = None,
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = index
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Free blocks that hold something, least recently used first.
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._num_owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._waiting)

    @property
    def next_evicted(self) -> int | None:
        """The block whose contents the next allocation forgets; None: a blank one is left."""
        return None if self._blank or not self._waiting else next(iter(self._waiting))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_owners(self, block_id: int) -> int:
        return self._num_owners[block_id]

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks; what they held is forgotten.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        assert count >= 0, count
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} cache blocks of {self.block_size} tokens are needed, {self.num_free} of "
                f"{self.num_blocks} are free"
            )
        return [self._take_free() for _ in range(count)]

    def share(self, block_ids: Iterable[int]) -> None:
        """Takes blocks with what they hold, whether they are free or others have them."""
        for block_id in block_ids:
            if self._num_owners[block_id] == 0:
                del self._waiting[block_id]
            self._num_owners[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back. Freeing a block that is not in use is a bug of the caller; nothing changes."""
        ids = list(block_ids)
        assert len(set(ids)) == len(ids), f"blocks freed twice in one call: {ids}"
        for block_id in ids:
            assert 0 <= block_id < self.num_blocks and self._num_owners[block_id], (
                f"block {block_id} is not in use"
            )
        # Backwards, so that of a sequence the end is evicted before what it continues.
        for block_id in reversed(ids):
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0 and self._is_known(block_id):
                self._waiting[block_id] = None
        self._blank.extend(
            block_id for block_id in ids if not self._num_owners[block_id] and not self._is_known(block_id)
        )

    def check_integrity(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Recomputes everything from scratch.

        Args:
            tables: every live table; when given, each block must have as many owners as tables list it.

        Raises:
            AssertionError: a block is free twice, free and used, lost, or its owners are not those tables;
                or a blank one holds something, or one that waits does not.
        """
        blank, waiting = set(self._blank), set(self._waiting)
        used = {block_id for block_id in range(self.num_blocks) if self._num_owners[block_id]}
        assert len(blank) == len(self._blank), f"blocks are free twice: {sorted(self._blank)}"
        assert not blank & waiting, f"blocks are blank and waiting: {sorted(blank & waiting)}"
        free = blank | waiting
        assert not free & used, f"blocks are free and in use: {sorted(free & used)}"
        assert free | used == set(range(self.num_blocks)), (
            "blocks are neither free nor in use, or do not exist"
        )
        assert not any(map(self._is_known, blank)), "a blank block holds something"
        assert all(map(self._is_known, waiting)), "a block waits and holds nothing"
        if self.index is not None:
            self.index.check_integrity()
        if tables is None:
            return
        owned = Counter(block_id for table in tables for block_id in table.block_ids)
        assert dict(owned) == {block_id: self._num_owners[block_id] for block_id in used}, (
            f"owners of the used blocks {sorted(used)} are not the sequences that list them: {dict(owned)}"
        )

    def _is_known(self, block_id: int) -> bool:
        return self.index is not None and self.index.num_held(block_id) > 0

    def _take_free(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._waiting.popitem(last=False)
            assert self.index is not None, "only what the index knows waits"
            self.index.truncate(block_id, 0)
        self._num_owners[block_id] = 1
        return block_id


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    __slots__ = ("allocator", "block_ids")

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.block_ids: list[int] = []

    @property
    def capacity(self) -> int:
        return len(self.block_ids) * self.allocator.block_size

    def reserve(self, num_tokens: int) -> None:
        """Grows until ``num_tokens`` tokens fit; never shrinks.

        Raises:
            OutOfBlocksError: no room; nothing was changed.
        """
        missing = self.allocator.num_blocks_for(num_tokens) - len(self.block_ids)
        if missing > 0:
            self.block_ids.extend(self.allocator.allocate(missing))

    def replace(self, first: int, block_ids: Iterable[int]) -> None:
        """Puts ``block_ids``, already taken for it, in the place of its own from index ``first`` on."""
        dropped = self.block_ids[first:]
        self.block_ids[first:] = block_ids
        self.allocator.free(dropped)

    def truncate(self, num_tokens: int) -> None:
        """Frees the whole tail blocks that the first ``num_tokens`` tokens do not touch; never grows."""
        assert num_tokens >= 0, num_tokens
        keep = self.allocator.num_blocks_for(num_tokens)
        if keep < len(self.block_ids):
            self.replace(keep, ())

    def release(self) -> None:
        self.truncate(0)


class BlockCache:
    """The K/V tensors of all layers.

    ``layers``: ``[num_blocks * block_size, 2 * num_kv_heads, head_dim]`` each, a slot's keys before its
    values, so that both are written at once; ``[num_blocks * block_size, num_numbers]`` of a layer whose keys
    and values differ in size. ``keys`` and ``values`` are views of the parts as attention wants them,
    ``[num_kv_heads, 1, num_slots, head_dim]``. Consecutive slots are consecutive in memory, so
    the tokens of a sequence whose blocks are consecutive are one view.
    On CPU the allocation is virtual until it is written, or populated.

    Args:
        num_state_slots: sequences whose states recurrent layers keep at once.
        max_open: most tokens that a sequence of a model with such layers may lose again.
        num_snapshots: states that such layers keep for other sequences.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_state_slots: int = 1,
        max_open: int = MAX_OPEN_ROWS,
        num_snapshots: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states: StatePool | None = None
        """What recurrent layers have seen of sequences; None: the model has none."""
        if shape.states:
            self.states = StatePool(
                shape.states,
                num_slots=num_state_slots,
                max_open=max_open,
                num_snapshots=num_snapshots,
                dtype=dtype,
                device=device,
            )
        num_slots = num_blocks * block_size
        sizes = [(num_slots, *_slot_shape(layer)) for layer in shape.layers]
        # Zeros, not garbage: a masked slot has weight 0, and 0 times a stray NaN would still be NaN.
        self._memories: list[mmap.mmap] = []
        self._num_given: list[int] = []
        """Bytes of each layer that ``populate`` gives."""
        if device.type == "cpu":
            self._memories = [_reserved(math.prod(size) * dtype.itemsize) for size in sizes]
            self.layers = [
                torch.frombuffer(memory, dtype=dtype).view(size)
                for memory, size in zip(self._memories, sizes, strict=True)
            ]
        else:
            self.layers = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        views = [_views(*both) for both in zip(self.layers, shape.layers, strict=True)]
        self.keys = [keys for keys, _ in views]
        self.values = [values for _, values in views]

    def take_large_pages(self, most_bytes: int) -> None:
        """Lets all layers lie in large pages, where a block fills some, and ``populate`` give some memory.

        Measured: 32 sequences of 250 tokens are read a seventh faster. Smaller sequences would leave most of
        a large page empty: theirs is given as they write it. Nothing happens on other devices.

        Args:
            most_bytes: bytes that are given at most; those of the first blocks.
        """
        smallest = min(layer.nbytes for layer in self.layers)
        if not self._memories or smallest // self.num_blocks < HUGE_PAGE:
            return
        share = most_bytes // len(self._memories)
        try:
            for memory in self._memories:
                memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):  # another system, or a kernel without them
            return
        self._num_given = [min(layer.nbytes, share) // HUGE_PAGE * HUGE_PAGE for layer in self.layers]

    def populate(self) -> int:
        """Gives the first blocks memory, a piece of each layer in turn; returns their bytes.

        So prompts do not wait for the system to find memory, which on a virtual machine takes longer than
        their forward. What is in the blocks stays.
        """
        sizes, self._num_given = self._num_given, []
        return self._give(sizes)

    def populate_aside(self, after_s: float = _POPULATED_AFTER_S) -> None:
        """Populates in a thread of the lowest priority, ``after_s`` seconds from now."""
        alive = weakref.ref(self)

        def give() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
            time.sleep(after_s)
            if (cache := alive()) is not None:
                cache.populate()

        if self._num_given:
            threading.Thread(target=give, name="specray-populate", daemon=True).start()

    def _give(self, sizes: Sequence[int]) -> int:
        # Called by ctypes, Python's other threads go on.
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        given = 0
        for start in range(0, max(sizes, default=0), _PIECE):
            for layer, size in zip(self.layers, sizes, strict=True):
                length = min(_PIECE, size - start)
                if length <= 0:
                    continue
                place = ctypes.c_void_p(layer.data_ptr() + start)
                if madvise is None or madvise(place, ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                    return given  # a kernel before Linux 5.14
                given += length
        return given

    def write(self, layer: int, slots: slice | torch.Tensor, keys_values: torch.Tensor) -> None:
        """Stores keys and values ``[num_tokens, 2 * num_kv_heads, head_dim]`` at ``slots``.

        Args:
            keys_values: ``[num_tokens, num_numbers]`` for a layer whose keys and values differ in size.
            slots: a slice, or an index tensor ``[num_tokens]``, of slots.
        """
        if isinstance(slots, slice):
            self.layers[layer].narrow(0, slots.start, slots.stop - slots.start).copy_(keys_values)
        else:
            self.layers[layer].index_copy_(0, slots, keys_values)

    def copy(self, source: slice | torch.Tensor, destination: slice | torch.Tensor) -> None:
        """Copies the K/V of ``source`` slots to ``destination`` slots of the same number, in every layer."""
        for tensor in self.layers:
            if isinstance(source, torch.Tensor) and isinstance(destination, torch.Tensor):
                tensor.index_copy_(0, destination, tensor.index_select(0, source))
            else:
                tensor[destination] = tensor[source].clone()


def _reserved(num_bytes: int) -> mmap.mmap:
    # torch.zeros writes every page of the cache at start; the system's own are zero until written. Small
    # pages: a block's first tokens, over 16 layers, cost 54 ms in huge ones (numpy's) and 0.6 ms in these.
    # Private: what is written is the process's own memory, and is seen to be.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without huge pages.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _slot_shape(layer: LayerShape) -> tuple[int, ...]:
    if layer.key_dim == layer.value_dim:
        return 2 * layer.num_kv_heads, layer.key_dim
    return (layer.num_numbers,)


def _views(slots: torch.Tensor, layer: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, ``[num_kv_heads, 1, num_slots, size]`` each."""
    keys, values = slots.flatten(1).tensor_split((layer.num_kv_heads * layer.key_dim,), dim=1)
    keys = keys.view(len(slots), layer.num_kv_heads, layer.key_dim)
    values = values.view(len(slots), layer.num_kv_heads, layer.value_dim)
    return keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1)


def bytes_per_token(shape: CacheShape, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return shape.num_numbers * dtype.itemsize
