"""What the two processes of a drafter have of its checkpoint: what fuses features, and what drafts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specray.engine.features.base import Fuser, Placed
from specray.engine.features.block.drafter import BlockFuser
from specray.engine.features.block.layout import BlockLayout
from specray.engine.features.chained.drafter import MAX_ROWS
from specray.engine.features.eagle import EagleFuser
from specray.engine.features.eagle_layout import EagleLayout
from specray.engine.features.loader import Layout
from specray.engine.features.mtp.layout import MtpLayout


class LastHidden:
    """Implements ``base.Fuser`` for drafters that read what the target's head reads: Medusa, MTP layers."""

    def __init__(self, layout: Layout, parts: Placed) -> None:
        self.feature_layers, self.feature_size = layout.feature_layers, layout.feature_size
        self._dtype = parts.dtype

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return features[self.feature_layers[0]].to(self._dtype)


def load_fuser(layout: Layout, parts: Placed) -> Fuser:
    """The target's part of a drafter."""
    if isinstance(layout, EagleLayout):
        return EagleFuser(layout, parts)
    if isinstance(layout, BlockLayout):
        return BlockFuser(layout, parts)
    return LastHidden(layout, parts)


def num_fuser_weights(layout: Layout) -> int:
    """Numbers of the tensors that the target's part holds."""
    if isinstance(layout, EagleLayout | BlockLayout):
        return sum(tensor.numel() for tensor in layout.fc if tensor is not None)
    return 0


def reads_embedding(layout: Layout) -> bool:
    """Whether it looks tokens up in the target's embedding."""
    if isinstance(layout, EagleLayout | BlockLayout):
        return layout.embedding is None
    return isinstance(layout, MtpLayout)


def reads_head(layout: Layout) -> bool:
    """Whether it draws through the target's head."""
    if isinstance(layout, EagleLayout | BlockLayout):
        return layout.head is None
    return isinstance(layout, MtpLayout) or any(weight is None for weight in layout.outputs)


def num_step_numbers(layout: Layout, num_tokens: int) -> int:
    """Numbers that a step of so many tokens takes between the layers, about."""
    if isinstance(layout, EagleLayout | BlockLayout):
        return num_tokens * sum(layer.num_columns for layer in layout.layers)
    if isinstance(layout, MtpLayout):
        weights = layout.forward.model.parameters()
        return num_tokens * sum(weight.shape[0] for weight in weights if weight.ndim == 2)
    return 0


def mask_bytes(layout: Layout, max_model_len: int, item_bytes: int) -> int:
    """Bytes of the mask of the last rows of the longest sequence: numbers, and what they are made from."""
    if isinstance(layout, EagleLayout):
        group_size = layout.attention.num_attention_heads // layout.attention.num_key_value_heads
    elif isinstance(layout, MtpLayout):
        group_size = layout.group_size
    else:
        return 0
    return min(MAX_ROWS, max_model_len) * group_size * max_model_len * (item_bytes + 1)


def one_pass_kind(layout: Layout) -> str | None:
    """Kind of a drafter that does not go on from its own output; None: it does."""
    if isinstance(layout, BlockLayout):
        return "a DFlash or DSpark drafter"
    if isinstance(layout, EagleLayout):
        return None if layout.masks is None else "a P-EAGLE drafter"
    return None if isinstance(layout, MtpLayout) else "a Medusa drafter"
