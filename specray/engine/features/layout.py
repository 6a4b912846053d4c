"""What a drafter's checkpoint says of it before it is loaded, whichever kind it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.features.chained.drafter import MAX_ROWS
from specray.engine.features.decoder_layers import LayerTensors, WeightAndBias
from specray.engine.model.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLayout(ABC):
    """A checkpoint that fits the target."""

    path: str
    feature_layers: tuple[int, ...]
    hidden_size: int

    @property
    def feature_size(self) -> int:
        """Numbers that are stored of each token's features."""
        return self.hidden_size

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """Numbers of the tensors that are held."""

    @property
    def num_fuser_weights(self) -> int:
        """Numbers that the target's process holds where the drafter runs in another."""
        return 0

    @property
    def reads_embedding(self) -> bool:
        """Whether it looks tokens up in the target's embedding."""
        return False

    @property
    @abstractmethod
    def reads_head(self) -> bool:
        """Whether it draws through the target's head."""

    @property
    def one_pass_kind(self) -> str | None:
        """Kind of a drafter that does not go on from its own output; None: it does."""
        return None

    @property
    def mask_group_size(self) -> int:
        """Query heads per key head where rows have a mask of all tokens before; 0: they have none."""
        return 0

    def bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of features and K/V that one token takes."""
        return item_bytes * self.feature_size

    def num_step_numbers(self, num_tokens: int) -> int:
        """Numbers that a step of ``num_tokens`` takes between the layers, about."""
        return 0

    def mask_bytes(self, max_model_len: int, item_bytes: int) -> int:
        """Bytes of the mask of the longest sequence's last rows: numbers, and what they are made from."""
        num_rows = min(MAX_ROWS, max_model_len) * self.mask_group_size
        return num_rows * max_model_len * (item_bytes + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayout(DrafterLayout):
    """A drafter of decoder layers after ``fc``, with everything that its forward depends on."""

    attention: DecoderConfig
    """Heads, rotary positions and epsilon of its layers."""
    fc: WeightAndBias
    layers: tuple[LayerTensors, ...]
    embedding: torch.Tensor | None
    """None: the target's."""
    head: torch.Tensor | None
    """Rows in the order of ``token_ids``; None: the target's."""
    token_ids: NDArray[np.int64] | None
    """Token ids of the logits, ascending; None: all of the target's."""
    logit_scale: float

    @property
    def num_decoder_weights(self) -> int:
        """Numbers of layers, ``fc``, embedding and head."""
        own = (self.embedding, self.head, *self.fc)
        layers = sum(layer.num_weights for layer in self.layers)
        return layers + sum(tensor.numel() for tensor in own if tensor is not None)

    @property
    def num_weights(self) -> int:
        return self.num_decoder_weights

    @property
    def num_fuser_weights(self) -> int:
        return sum(tensor.numel() for tensor in self.fc if tensor is not None)

    @property
    def reads_embedding(self) -> bool:
        return self.embedding is None

    @property
    def reads_head(self) -> bool:
        return self.head is None

    def bytes_per_token(self, item_bytes: int) -> int:
        keys_values = 2 * self.attention.num_key_value_heads * self.attention.head_dim
        return item_bytes * (self.feature_size + len(self.layers) * keys_values)

    def num_step_numbers(self, num_tokens: int) -> int:
        return num_tokens * sum(layer.num_columns for layer in self.layers)
