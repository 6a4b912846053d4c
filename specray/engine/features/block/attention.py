"""Attention of blocks: each row sees the sequence before its block, and rows of the block.

What the sequence gives lies in the cache. The block's own keys and values are of this forward alone and are
never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from specray.engine.attention.sdpa import select_slots, sequence_slots
from specray.engine.cache.blocks import BlockCache
from specray.engine.features.base import Context


@dataclass(frozen=True, slots=True)
class BlockReach:
    """What the rows of a layer see."""

    window: int | None
    """Positions before and after a row up to which it sees, its own included; None: all."""
    is_causal: bool
    """True: a row of the block sees itself and those before it; False: the whole block."""


@dataclass(frozen=True, slots=True)
class BlockStep:
    """The attention of one forward over the blocks of many sequences."""

    cache: BlockCache
    contexts: Sequence[Context]
    size: int
    """Rows of a block, whose first one is the last token of its sequence."""
    _masks: dict[tuple[int, BlockReach], torch.Tensor | None] = field(default_factory=dict)

    def attend(
        self, layer: int, reach: BlockReach, query: torch.Tensor, keys_values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attends.

        Args:
            query: ``[num_rows, num_heads, head_dim]``, block after block.
            keys_values: ``[num_rows, 2 * num_kv_heads, head_dim]``, the keys before the values.

        Returns:
            ``[num_rows, num_heads * head_dim]``.
        """
        outputs = []
        for index, context in enumerate(self.contexts):
            rows = slice(index * self.size, (index + 1) * self.size)
            length = len(context.token_ids) - 1
            first = 0 if reach.window is None else max(0, length - reach.window + 1)
            keys, values = keys_values[rows].transpose(0, 1).unsqueeze(1).chunk(2)
            if first < length:
                device = query.device
                slots = sequence_slots(context.block_ids, first, length, self.cache.block_size, device)
                keys = torch.cat((select_slots(self.cache.keys[layer], slots), keys), 2)
                values = torch.cat((select_slots(self.cache.values[layer], slots), values), 2)
            mask = self._mask(length - first, reach, query)
            outputs.append(_attend(query[rows], keys, values, mask, scale))
        return torch.cat(outputs)

    def _mask(self, num_before: int, reach: BlockReach, like: torch.Tensor) -> torch.Tensor | None:
        """What is added to the scores, ``[size, num_before + size]``; None: nothing is hidden."""
        if (num_before, reach) not in self._masks:
            keys = torch.arange(num_before + self.size, device=like.device)
            ahead = keys - torch.arange(num_before, num_before + self.size, device=like.device)[:, None]
            is_hidden = torch.zeros_like(ahead, dtype=torch.bool)
            if reach.window is not None:
                is_hidden |= ahead.abs() >= reach.window
            if reach.is_causal:
                is_hidden |= ahead > 0
            mask = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device)
            needs_mask = reach.is_causal or reach.window is not None
            self._masks[num_before, reach] = mask.masked_fill_(is_hidden, -torch.inf) if needs_mask else None
        return self._masks[num_before, reach]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The rows of one block; query heads that share a kv head are further rows of it."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    group_size = num_heads // num_kv_heads
    by_head = query.view(num_rows, num_kv_heads, group_size, head_dim).transpose(0, 1)
    grouped = by_head.reshape(num_kv_heads, 1, num_rows * group_size, head_dim)
    shared = None if mask is None else mask.repeat_interleave(group_size, 0)
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=shared, scale=scale)
    by_row = output.view(num_kv_heads, num_rows, group_size, head_dim).transpose(0, 1)
    return by_row.reshape(num_rows, num_heads * head_dim)
