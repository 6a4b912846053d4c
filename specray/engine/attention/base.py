"""Attention as the decoder calls it: the interfaces, the norm of heads, and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from specray.engine.step import AttentionStep, Slots


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every query and key head, each kind with its own weight."""

    weight: torch.Tensor  # [num_heads + num_kv_heads, head_dim], float32 or as the heads
    eps: float

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(heads.to(self.weight.dtype), self.weight.shape[1:], None, self.eps) * self.weight


class StepAttention(Protocol):
    """The attention of one step, called layer after layer."""

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, stores keys and values, and attends.

        Args:
            qkv: ``[num_rows, (num_heads + 2 * num_kv_heads) * head_dim]``; its contents are lost.
            sinks: score of each query head's sink, ``[num_heads]``, float32, which takes weight and has no
                value (Xiao et al.: *Efficient streaming language models with attention sinks*, 2023; learned
                as in gpt-oss); None: there are none.

        Returns:
            ``[num_rows, num_heads * head_dim]``.
        """
        ...


class Attention(Protocol):
    """What lies between the qkv and the output projection."""

    def prepare(self, step: AttentionStep, positions: Slots) -> StepAttention: ...


@dataclass(frozen=True, slots=True)
class LayeredAttention:
    """Implements :class:`Attention` where layers rotate in several ways."""

    kinds: tuple[Attention, ...]
    of_layers: tuple[int, ...]
    """Index of each layer's kind."""

    def prepare(self, step: AttentionStep, positions: Slots) -> _LayeredStep:
        return _LayeredStep(tuple(kind.prepare(step, positions) for kind in self.kinds), self.of_layers)


@dataclass(frozen=True, slots=True)
class _LayeredStep:
    kinds: tuple[StepAttention, ...]
    of_layers: tuple[int, ...]

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.kinds[self.of_layers[layer]].attend(layer, qkv, head_norm, window, sinks)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions (Su et al., 2021), as the model's own module computes them, for all positions."""

    cos: torch.Tensor  # [max_model_len, 1, head_dim]
    sin: torch.Tensor  # [max_model_len, 1, head_dim], the first half of head_dim negated

    def at(self, positions: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' tables."""
        if isinstance(positions, slice):
            first, count = positions.start, positions.stop - positions.start
            return self.cos.narrow(0, first, count), self.sin.narrow(0, first, count)
        return self.cos[positions], self.sin[positions]


def rotate_heads(
    heads: torch.Tensor, head_norm: HeadNorm | None, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Norms and rotates query and key heads ``[num_rows, num_heads + num_kv_heads, head_dim]`` in place.

    Args:
        cos, sin: the rows' tables, as ``Rotary.at`` gives them; of fewer numbers than a head has, they are
            for its last ones, and there is no norm.
    """
    if head_norm is not None:
        heads.copy_(head_norm(heads))
    heads = heads.narrow(-1, heads.shape[-1] - cos.shape[-1], cos.shape[-1])
    swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)
