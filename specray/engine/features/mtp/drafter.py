"""The MTP forward: one more layer of the target's kind after its last hidden state.

An entry joins the embedding of a token with what the target's head read before it, or with what left the norm
of this layer, for tokens that the layer itself has drawn. Both are normed, each by a norm of its own
(DeepSeek-V3 Technical Report, 2024, 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specray.engine.features.base import LastHidden, TargetParts
from specray.engine.features.chained.drafter import FIRST_ENTRY, ChainedDrafter
from specray.engine.features.mtp.layout import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    OUTPUT_NORM,
    PROJECTION,
    MtpLayout,
)
from specray.engine.model.checkpoint.rank_weights import RankWeights
from specray.engine.model.decoder import DecoderForward, Norm
from specray.engine.model.decoder_config import layer_prefix
from specray.engine.model.linear import Linear
from specray.engine.model.lowering import head_shape, lower_layer, lower_norm
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.model.quantized.operator_set import operator_set
from specray.engine.model.rotary import tables_of_layers
from specray.engine.step import AttentionStep, SequenceRows, Step


class _AsTheyAre:
    """Stands for the decoder's embedding and head: hands on what enters the layer or leaves its norm."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """One layer, with what is before and after it."""

    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear
    is_hidden_first: bool
    forward: DecoderForward

    def __call__(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """What leaves the norm after the layer, ``[num_rows, hidden_size]``."""
        both = [self.embedding_norm(embedded), self.hidden_norm(features)]
        entering = self.projection(torch.cat(both[::-1] if self.is_hidden_first else both, -1))
        no_ids = positions[:0]
        return self.forward.decode(entering, Step(no_ids, positions, step, None)).logits


def lower_mtp(layout: MtpLayout, parts: TargetParts) -> list[MtpLayer]:
    """Builds the layers. Raises ConfigError: a weight is damaged, or holds NaN or infinite values."""
    config, taken = layout.config, RankWeights(layout.open(parts.dtype, parts.device), None)
    operators = operator_set(parts.operators, layout.formats, parts.dtype, parts.device).layers
    # What each sequence sees begins behind its first slot.
    shape = head_shape(config, None)
    attention = TorchOperators(parts.dtype).attention(
        tables_of_layers(config, parts.max_model_len, parts.device), shape
    )
    rows = _AsTheyAre()

    def lower(index: int, prefix: str) -> MtpLayer:
        forward = DecoderForward(
            embedding=rows,
            layers=(lower_layer(index, config, shape, taken, operators),),
            final_norm=lower_norm(f"{prefix}{OUTPUT_NORM}", config, taken, operators),
            head=rows,
            attention=attention,
            cache_shape=layout.cache_shape,
        )
        return MtpLayer(
            lower_norm(f"{prefix}{EMBEDDING_NORM}", config, taken, operators),
            lower_norm(f"{prefix}{HIDDEN_NORM}", config, taken, operators),
            operators.linear(taken.weight(f"{prefix}{PROJECTION}"), None),
            layout.is_hidden_first,
            forward,
        )

    return [lower(index, layer_prefix(index)) for index in range(layout.num_layers)]


class MtpDrafter(ChainedDrafter):
    """A drafter with one MTP layer.

    Args:
        layout: the layers.
        parts: what is the target's.
    """

    def __init__(self, layout: MtpLayout, parts: TargetParts) -> None:
        super().__init__(parts, LastHidden(layout, parts))
        self.token_ids = parts.token_ids
        self._layers = lower_mtp(layout, parts)
        self._cache = parts.cache(layout.cache_shape)

    def _forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        rows: tuple[SequenceRows, ...],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        step = AttentionStep(rows, self._cache, first_index=FIRST_ENTRY)
        return self._layers[0](self._parts.embed(token_ids), features, positions, step)

    def _finish(self, output: torch.Tensor) -> torch.Tensor:
        self._recycled = output
        return self._parts.logits(output)
