"""The EAGLE forward: one small decoder behind fused features, that goes on with its own output.

The entry of token j joins the embedding of token j with the feature of token j - 1, and its K/V lie at token
j's slot, though its rotary position is j - 1. So it depends on tokens 0..j alone, as everything at that slot
does; slot 0 has none.

::

    slot                 0      1            2            ...
    features             f0     f1           f2
    entries, K/V         -      (t1, f0)     (t2, f1)     ...    -> draft token

A drafter with masks (P-EAGLE, arXiv 2602.01469) draws all its tokens in one forward: behind the last entry
stand masks, a token and a feature that it has learned, each in the place of a draft token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.attention.sdpa import SdpaStep, sequence_slots
from specray.engine.cache.blocks import BlockCache
from specray.engine.features.base import Context, Continued, FeatureStore, TargetParts
from specray.engine.features.decoder_layers import Lowering
from specray.engine.features.eagle_layout import EagleLayout
from specray.engine.features.shared_rows import SharedRows, for_each_row
from specray.engine.features.vocabulary import make_embedding, make_head
from specray.engine.model.decoder import Rotary, rotate_heads
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.model.rotary import cos_sin
from specray.engine.step import AttentionStep, CacheShape, SequenceRows

_FIRST_ENTRY = 1
"""KV index of the first entry."""
_MAX_ROWS = 2048
"""Rows of one forward, at most, while long prompts are caught up with."""


@dataclass(frozen=True, slots=True)
class _Entries:
    """Consecutive entries of one sequence: tokens ``first..end - 1``, with the features before them."""

    context: Context
    first: int
    end: int
    num_masks: int = 0
    """Masks behind them, in the place of draft tokens that are not known yet."""


class EagleDrafter:
    """Implements ``base.FeatureDrafter``.

    Args:
        layout: the checkpoint.
        parts: what is the target's.
    """

    def __init__(self, layout: EagleLayout, parts: TargetParts) -> None:
        self._layout = layout
        self._parts = parts
        self.feature_layers = layout.feature_layers
        self.max_draft_tokens: int | None = None
        self.token_ids: NDArray[np.int64] | None = layout.token_ids
        self.rank_acceptance: tuple[tuple[float, ...], ...] = ()
        attention = layout.attention
        self._num_heads, self._num_kv_heads = attention.num_attention_heads, attention.num_key_value_heads
        self._head_dim = attention.head_dim
        lowering = Lowering(parts, attention)
        self._fc = lowering.linear(layout.fc)
        self._fc_norms = [lowering.norm(weight) for weight in layout.fc_norms]
        self._final_norm = None if layout.norm is None else lowering.norm(layout.norm)
        self._layers = tuple(lowering.layer(layer) for layer in layout.layers)
        self._embed = make_embedding(layout.embedding, parts)
        self._logits = make_head(layout.head, layout.token_ids, parts)
        self._rotary: Rotary = rotary_tables(
            *cos_sin(attention, parts.max_model_len, parts.device), parts.dtype
        )
        self._cache = BlockCache(
            CacheShape(len(self._layers), self._num_kv_heads, self._head_dim),
            num_blocks=parts.num_blocks,
            block_size=parts.block_size,
            dtype=parts.dtype,
            device=parts.device,
        )
        self._mask_feature = None if layout.masks is None else self._fc(lowering.cast(layout.masks.features))
        self._ahead = torch.empty(0)
        """Outputs of the masks, sequence after sequence."""
        self._first_masks: list[int] = []
        """Index of each sequence's first row in ``_ahead``."""
        self._shared = SharedRows()
        self._recycled = torch.empty(0)
        """Outputs of the last step's rows, which stand for the features of their tokens."""

    @property
    def feature_size(self) -> int:
        """Numbers that are stored of each token."""
        layout = self._layout
        return layout.target_hidden_size if layout.joins_embedding_in_fc else layout.hidden_size

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """See ``base.FeatureDrafter``."""
        rows = [features[layer].to(self._parts.dtype) for layer in self.feature_layers]
        if self._layout.joins_embedding_in_fc:
            return rows[0]
        if len(self._fc_norms) > 1:
            rows = [norm(each.contiguous()) for norm, each in zip(self._fc_norms, rows, strict=True)]
        joined = torch.cat(rows, -1)
        return self._fc(self._fc_norms[0](joined) if len(self._fc_norms) == 1 else joined)

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        """See ``base.FeatureDrafter``."""
        most = max(1, _MAX_ROWS // len(contexts))
        last: list[_Entries] = []
        for context in contexts:
            first, end = max(_FIRST_ENTRY, context.num_valid), len(context.token_ids)
            while end - first > most:
                # Alone it has all the rows that a pass takes.
                size = min(_MAX_ROWS, end - first - most)
                self._run_entries(store, [_Entries(context, first, first + size)])
                first += size
            num_masks = 0 if self._mask_feature is None else context.num_wanted - 1
            last.append(_Entries(context, min(first, end - 1), end, num_masks))
        output = self._run_entries(store, last)
        ends, at = [], -1
        for entries in last:
            at += entries.end - entries.first
            ends.append(at)
            at += entries.num_masks
        if self._mask_feature is not None:
            self._ahead, self._first_masks = output, [end + 1 for end in ends]
            self._shared.begin(len(contexts))
        return self._finish(output[torch.tensor(ends, device=output.device)])

    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        """See ``base.FeatureDrafter``."""
        if self._mask_feature is not None:
            return self._draw_ahead(continued)
        device = self._parts.device
        rows: list[SequenceRows] = []
        positions: list[int] = []
        for each in continued:
            seen, blocks = each.visibility, each.context.block_ids
            start = min(row.position for row in seen)
            # All that is before a chain's next token is what it sees: no mask is needed.
            masks = () if each.is_chain else seen
            rows.append(SequenceRows(len(positions), len(seen), start, blocks, masks))
            positions += [row.position - 1 for row in seen]
        sources = torch.tensor([source for each in continued for source in each.sources], device=device)
        tokens = torch.tensor([token for each in continued for token in each.token_ids], device=device)
        output = self._forward(
            tokens, self._recycled[sources], tuple(rows), torch.tensor(positions, device=device)
        )
        return self._finish(output)

    def acceptance(self) -> list[float] | None:
        """See ``base.FeatureDrafter``."""
        return None

    def _draw_ahead(self, continued: Sequence[Continued]) -> torch.Tensor:
        """Logits of the next masks, which are computed."""
        own = self._shared.advance(continued)
        masks = [self._first_masks[each] + self._shared.depth - 1 for each in own]
        output = self._ahead[torch.tensor(masks, device=self._parts.device)]
        return for_each_row(self._finish(output), continued)

    def _run_entries(self, store: FeatureStore, pieces: Sequence[_Entries]) -> torch.Tensor:
        device, size = self._parts.device, self._cache.block_size
        features: list[torch.Tensor] = []
        rows: list[SequenceRows] = []
        positions: list[int] = []
        token_ids: list[int] = []
        for piece in pieces:
            first, end, blocks = piece.first, piece.end, piece.context.block_ids
            features.append(store.rows[sequence_slots(blocks, first - 1, end - 1, size, device)])
            num_masks, masks = piece.num_masks, self._layout.masks
            rows.append(SequenceRows(len(token_ids), end - first + num_masks, first, blocks))
            positions.extend(range(first - 1, end - 1 + num_masks))
            token_ids.extend(piece.context.token_ids[first:end])
            if num_masks and masks is not None and self._mask_feature is not None:
                features.append(self._mask_feature.expand(num_masks, -1))
                token_ids.extend([masks.token_id] * num_masks)
        return self._forward(
            torch.tensor(token_ids, device=device),
            torch.cat(features),
            tuple(rows),
            torch.tensor(positions, device=device),
        )

    def _forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        rows: tuple[SequenceRows, ...],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """What leaves the last layer, ``[num_rows, hidden_size]``."""
        embedded = self._embed(token_ids)
        attention = SdpaStep(AttentionStep(rows, self._cache), first_index=_FIRST_ENTRY)
        cos, sin = self._rotary.at(positions)
        hidden = features
        if self._layout.joins_embedding_in_fc:
            hidden = self._fc(torch.cat((embedded, features), -1))
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
            )
            hidden = layer.output.plus(attended, hidden)
            hidden = layer.down.plus(layer.gate(layer.post_norm(hidden)), hidden)
        return hidden

    def _finish(self, output: torch.Tensor) -> torch.Tensor:
        """Logits of rows that left the last layer, which the next step goes on with."""
        normed = output if self._final_norm is None else self._final_norm(output)
        # Later steps may write to their residuals.
        self._recycled = (normed if self._layout.is_output_normed else output).clone()
        logits = self._logits(normed)
        return logits if self._layout.logit_scale == 1.0 else logits * self._layout.logit_scale
