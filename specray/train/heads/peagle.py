"""An EAGLE-3 head in training that draws all its tokens in one forward, at masks.

*P-EAGLE*, arXiv 2602.01469. Behind the entry of the last token stand masks: one token's embedding, with a
feature that is learned in the place of the target's. Masks see and are dropped as those of ``pard`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specray.train.heads.base import DraftRows
from specray.train.heads.eagle import EagleHead
from specray.train.heads.pard import MaskChains, anchor_groups, chain_mask, chain_rows, joined_depths


class ParallelEagleHead(MaskChains, EagleHead):
    """Implements ``base.DraftHead``.

    Args:
        model, draft_ids, feature_layers, seed, sizes: as ``EagleHead`` takes them.
        num_depths: tokens that are drafted in one forward.
        mask_id: token of the target that stands for one to be drafted.
        keep_rate: share of the masks of a depth that the next one retains, in (0, 1].
        min_kept: least share of all prefixes that a depth retains.
    """

    name = "peagle"

    def __init__(
        self,
        model: Any,
        draft_ids: torch.Tensor,
        *,
        feature_layers: tuple[int, ...],
        num_depths: int,
        mask_id: int,
        keep_rate: float,
        min_kept: float,
        seed: int,
        sizes: torch.Tensor | None = None,
    ) -> None:
        super().__init__(
            model, draft_ids, feature_layers=feature_layers, num_depths=num_depths, seed=seed, sizes=sizes
        )
        self._mask_id = mask_id
        self._keep_rate, self._min_kept = keep_rate, min_kept
        generator = torch.Generator().manual_seed(seed)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features, generator=generator))

    def unroll(
        self,
        features: Mapping[int, torch.Tensor],
        token_ids: torch.Tensor,
        anchors: Sequence[torch.Tensor],
    ) -> Sequence[DraftRows]:
        """The first depth is drafted by the entries of tokens."""
        hidden = self.fc.join([features[layer] for layer in self.feature_layers])
        embedded = F.embedding(token_ids[:, 1 : hidden.shape[1] + 1], self.target_embedding).to(hidden.dtype)
        parts = [self._rows(embedded, hidden, group) for group in anchor_groups(anchors)]
        found = joined_depths(parts[0][0], [masks for _, masks in parts], anchors[0])
        return [DraftRows(F.linear(self.norm(rows), self.unembedding)) for rows in found]

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().tensors()
        tensors["mask_hidden"] = (self.mask_hidden.detach() * self.fc.sizes).to(self.mask_hidden.dtype)
        return tensors

    def config(self, target: str) -> dict[str, Any]:
        return {**super().config(target), "mask_token_id": self._mask_id}

    def _rows(
        self, embedded: torch.Tensor, hidden: torch.Tensor, anchors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What leaves the layer for the entries, and for the masks of each depth from 1 on."""
        num_rows, num_entries, _ = hidden.shape
        counts = [len(own) for own in anchors]
        ends, depths = chain_rows(num_entries, anchors, hidden.device)
        mask = self.target_embedding[self._mask_id].to(hidden.dtype)
        embedded = torch.cat((embedded, mask.expand(num_rows, sum(counts), -1)), 1)
        feature = self.fc(self.mask_hidden).expand(num_rows, sum(counts), -1)
        hidden = torch.cat((hidden, feature), 1)
        query, key, value = self._projected(embedded, hidden, ends + depths)
        mask = chain_mask(ends, depths, hidden.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        output = self.midlayer.leave(attended.transpose(1, 2).flatten(2), hidden)
        entries, *later = torch.split(output, [num_entries, *counts], 1)
        return entries, later
