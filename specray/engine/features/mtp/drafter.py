"""The MTP forward: one more layer of the target's kind after its last hidden state.

An entry joins the embedding of a token with what the target's head read before it, or with what left the norm
of this layer, for tokens that the layer itself has drawn. Both are normed, each by a norm of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.cache.blocks import BlockCache
from specray.engine.features.base import TargetParts
from specray.engine.features.chained.drafter import FIRST_ENTRY, ChainedDrafter
from specray.engine.features.mtp.layout import MtpLayout
from specray.engine.step import AttentionStep, SequenceRows


class MtpDrafter(ChainedDrafter):
    """Implements ``base.FeatureDrafter``.

    Args:
        layout: the layer.
        parts: what is the target's.
    """

    def __init__(self, layout: MtpLayout, parts: TargetParts) -> None:
        super().__init__(parts)
        self.feature_layers = layout.feature_layers
        self.feature_size = layout.hidden_size
        self.max_draft_tokens: int | None = None
        self.token_ids: NDArray[np.int64] | None = None
        self.rank_acceptance: tuple[tuple[float, ...], ...] = ()
        self._layout = layout
        untyped: torch.nn.Module = layout.forward.model
        untyped.to(parts.device)
        self._embedding_norm = layout.embedding_norm.to(parts.device)
        self._hidden_norm = layout.hidden_norm.to(parts.device)
        self._projection = parts.operators.linear(
            layout.projection.to(device=parts.device, dtype=parts.dtype), None
        )
        self._cache = BlockCache(
            layout.forward.cache_shape,
            num_blocks=parts.num_blocks,
            block_size=parts.block_size,
            dtype=parts.dtype,
            device=parts.device,
        )

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return features[self.feature_layers[0]].to(self._parts.dtype)

    def _forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        rows: tuple[SequenceRows, ...],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        layout, embedded = self._layout, self._parts.embed(token_ids)
        if layout.drops_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        both = [self._embedding_norm(embedded), self._hidden_norm(features)]
        entering = self._projection(torch.cat(both[::-1] if layout.is_hidden_first else both, -1))
        step = AttentionStep(rows, self._cache)
        return layout.forward.decode(entering, positions, step, first_index=FIRST_ENTRY)

    def _finish(self, output: torch.Tensor) -> torch.Tensor:
        self._recycled = output
        return self._parts.logits(output)
