"""The EAGLE forward: one small decoder after fused features, that goes on with its own output.

A drafter with masks (P-EAGLE, arXiv 2602.01469) draws all its tokens in one forward: after the last entry
stand masks, a token and a feature that it has learned, each in the place of a draft token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specray.engine.attention.base import Rotary, rotate_heads
from specray.engine.attention.sdpa import SdpaStep
from specray.engine.features.base import Context, Continued, FeatureStore, Placed, TargetParts
from specray.engine.features.chained.drafter import FIRST_ENTRY, ChainedDrafter
from specray.engine.features.decoder_layers import Lowering
from specray.engine.features.eagle.layout import EagleLayout
from specray.engine.features.shared_rows import SharedRows, for_each_row
from specray.engine.features.vocabulary import make_embedding, make_head
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.model.rotary import cos_sin
from specray.engine.step import AttentionStep, CacheShape, SequenceRows


class EagleFuser:
    """Implements ``base.Fuser``: joins the residuals that EAGLE-3 reads; EAGLE-1's are kept as they are.

    Args:
        layout: the checkpoint.
        parts: where ``fc`` goes.
    """

    def __init__(self, layout: EagleLayout, parts: Placed) -> None:
        lowering = Lowering(parts, layout.attention)
        self.feature_layers = layout.feature_layers
        self.feature_size = layout.feature_size
        self.fc = lowering.linear(layout.fc)
        self._norms = [lowering.norm(weight) for weight in layout.fc_norms]
        self._joins_embedding = layout.joins_embedding_in_fc
        self._dtype = parts.dtype

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        rows = [features[layer].to(self._dtype) for layer in self.feature_layers]
        if self._joins_embedding:
            return rows[0]
        if len(self._norms) > 1:
            rows = [norm(each.contiguous()) for norm, each in zip(self._norms, rows, strict=True)]
        joined = torch.cat(rows, -1)
        return self.fc(self._norms[0](joined) if len(self._norms) == 1 else joined)


class EagleDrafter(ChainedDrafter):
    """A drafter with an EAGLE checkpoint.

    Args:
        layout: the checkpoint.
        parts: what is the target's.
    """

    _fuser: EagleFuser

    def __init__(self, layout: EagleLayout, parts: TargetParts) -> None:
        super().__init__(parts, EagleFuser(layout, parts))
        self._layout = layout
        self.token_ids = layout.token_ids
        attention = layout.attention
        self._num_heads, self._num_kv_heads = attention.num_attention_heads, attention.num_key_value_heads
        self._head_dim = attention.head_dim
        lowering = Lowering(parts, attention)
        self._final_norm = None if layout.norm is None else lowering.norm(layout.norm)
        self._layers = tuple(lowering.layer(layer) for layer in layout.layers)
        self._embed = make_embedding(layout.embedding, parts)
        self._logits = make_head(layout.head, layout.token_ids, parts)
        self._rotary: Rotary = rotary_tables(
            *cos_sin(attention, parts.max_model_len, parts.device), parts.dtype
        )
        self._cache = parts.cache(CacheShape(len(self._layers), self._num_kv_heads, self._head_dim))
        self._mask_feature = (
            None if layout.masks is None else self._fuser.fc(lowering.cast(layout.masks.features))
        )
        self._ahead = torch.empty(0)
        """Outputs of the masks, sequence after sequence."""
        self._first_masks: list[int] = []
        """Index of each sequence's first row in ``_ahead``."""
        self._shared = SharedRows()

    @property
    def has_masks(self) -> bool:
        return self._mask_feature is not None

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        last = self._catch_up(store, contexts)
        output, ends = self.run_entries(store, last), self._last_rows(last)
        if self._mask_feature is not None:
            self._ahead, self._first_masks = output, [end + 1 for end in ends.tolist()]
            self._shared.begin(len(contexts))
        return self._finish(output[ends])

    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        return super().advance(continued) if self._mask_feature is None else self._draw_ahead(continued)

    def _num_masks(self, context: Context) -> int:
        return 0 if self._mask_feature is None else context.num_wanted - 1

    def _mask(self) -> tuple[int, torch.Tensor]:
        masks = self._layout.masks
        assert masks is not None and self._mask_feature is not None, "there are masks where any are wanted"
        return masks.token_id, self._mask_feature

    def _draw_ahead(self, continued: Sequence[Continued]) -> torch.Tensor:
        """Logits of the next masks, which are computed."""
        own = self._shared.advance(continued)
        masks = [self._first_masks[each] + self._shared.depth - 1 for each in own]
        output = self._ahead[torch.tensor(masks, device=self._parts.device)]
        return for_each_row(self._finish(output), continued)

    def _forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        rows: tuple[SequenceRows, ...],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        embedded = self._embed(token_ids)
        attention = SdpaStep(AttentionStep(rows, self._cache, first_index=FIRST_ENTRY))
        cos, sin = self._rotary.at(positions)
        hidden = features
        if self._layout.joins_embedding_in_fc:
            hidden = self._fuser.fc(torch.cat((embedded, features), -1))
        for index, layer in enumerate(self._layers):
            if layer.hidden_norm is not None and layer.input_norm is not None:
                normed = layer.hidden_norm(hidden)
                entering = torch.cat((layer.input_norm(embedded), normed), -1)
                hidden = normed if self._layout.is_residual_normed else hidden
            else:
                entering = hidden if layer.input_norm is None else layer.input_norm(hidden)
            heads = layer.qkv(entering).view(len(token_ids), -1, self._head_dim)
            num_rotated = self._num_heads + self._num_kv_heads
            rotate_heads(heads.narrow(1, 0, num_rotated), layer.head_norm, cos, sin)
            attended = attention.attend(
                index,
                heads.narrow(1, 0, self._num_heads),
                heads.narrow(1, self._num_heads, 2 * self._num_kv_heads),
                scale=self._head_dim**-0.5,
                window=self._layout.windows[index],
            )
            hidden = layer.output.plus(attended, hidden)
            hidden = layer.down.plus(layer.gate(layer.post_norm(hidden)), hidden)
        return hidden

    def _finish(self, output: torch.Tensor) -> torch.Tensor:
        normed = output if self._final_norm is None else self._final_norm(output)
        # Later steps may write to their residuals.
        self._recycled = (normed if self._layout.is_output_normed else output).clone()
        logits = self._logits(normed)
        return logits if self._layout.logit_scale == 1.0 else logits * self._layout.logit_scale
