"""Parts of the layers of heads in training: their sizes, their parameters, and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specray.train.heads.base import text_section, whole_number


@dataclass(frozen=True, slots=True)
class HeadLayerShape:
    """Sizes of a head's layers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    def fields(self) -> dict[str, Any]:
        """The sizes, under their names in a checkpoint's configuration."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
        }


def layer_shape(config: Any) -> HeadLayerShape:
    """A layer as wide as the target's own, with the target's heads.

    Raises:
        ConfigError: the target's configuration lacks a size.
    """
    section = text_section(config)
    hidden, num_heads = whole_number(section, "hidden_size"), whole_number(section, "num_attention_heads")
    rope = getattr(section, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return HeadLayerShape(
        hidden_size=hidden,
        intermediate_size=whole_number(section, "intermediate_size", 4 * hidden),
        num_heads=num_heads,
        num_kv_heads=whole_number(section, "num_key_value_heads", num_heads),
        head_dim=whole_number(section, "head_dim", hidden // num_heads),
        rope_theta=float(theta or 10_000.0),
        rms_norm_eps=float(getattr(section, "rms_norm_eps", None) or 1e-6),
        max_position_embeddings=whole_number(section, "max_position_embeddings", 2048),
    )


class HeadLayer(nn.Module):
    """A decoder layer's parameters, under the authors' names.

    Args:
        width: numbers that queries, keys and values are made of.
        has_hidden_norm: features have their own norm, besides the embedding's (EAGLE-3).
        has_head_norms: heads of queries and keys have norms (Qwen3).
    """

    def __init__(
        self,
        shape: HeadLayerShape,
        *,
        width: int,
        has_hidden_norm: bool = False,
        has_head_norms: bool = False,
    ) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._head_dim = shape.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        if has_hidden_norm:
            self.hidden_norm = nn.RMSNorm(hidden, eps)
        parts: dict[str, nn.Module] = {
            "q_proj": nn.Linear(width, query, bias=False),
            "k_proj": nn.Linear(width, key, bias=False),
            "v_proj": nn.Linear(width, key, bias=False),
            "o_proj": nn.Linear(query, hidden, bias=False),
        }
        if has_head_norms:
            parts |= {name: nn.RMSNorm(shape.head_dim, eps) for name in ("q_norm", "k_norm")}
        self.self_attn = nn.ModuleDict(parts)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, hidden, bias=False),
            }
        )

    def heads(self, kind: str, entering: torch.Tensor) -> torch.Tensor:
        """Heads ``[num_rows, num_heads, ..., head_dim]`` of rows ``[num_rows, ..., width]``.

        Args:
            kind: ``q``, ``k`` or ``v``.
        """
        found: torch.Tensor = self.self_attn[f"{kind}_proj"](entering).unflatten(-1, (-1, self._head_dim))
        if f"{kind}_norm" in self.self_attn:
            found = self.self_attn[f"{kind}_norm"](found)
        return found.movedim(-2, 1)

    def leave(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What leaves the layer.

        Args:
            attended: of all heads, ``[..., num_heads * head_dim]``.
            hidden: residuals that the attention joins, ``[..., hidden_size]``.
        """
        hidden = hidden + self.self_attn["o_proj"](attended)
        normed = self.post_attention_layernorm(hidden)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        output: torch.Tensor = hidden + self.mlp["down_proj"](gated)
        return output


class FeatureEntry(nn.Linear):
    """``fc``: joins features of several layers, after each number was divided by its usual size.

    Residuals grow from layer to layer, and some of their numbers are a hundred times as large as others.
    Behind a plain product they would drown the token's embedding, and steps would move what the largest give
    alone. What is written is the plain product: the divisors are folded into its weights.

    Args:
        num_layers: layers that are joined.
        sizes: usual sizes of their numbers, ``[num_layers * hidden_size]``; None: all are 1.
    """

    sizes: torch.Tensor

    def __init__(self, shape: HeadLayerShape, num_layers: int, sizes: torch.Tensor | None) -> None:
        super().__init__(num_layers * shape.hidden_size, shape.hidden_size, bias=False)
        found = torch.ones(self.in_features) if sizes is None else sizes.float()
        self.register_buffer("sizes", found, persistent=False)

    def join(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """One vector ``[..., hidden_size]`` of features of each layer, ``[..., hidden_size]`` each."""
        joined = torch.cat(tuple(features), -1) / self.sizes
        output: torch.Tensor = self(joined.to(self.weight.dtype))
        return output

    def written(self) -> torch.Tensor:
        """Weights for features as they are, ``[hidden_size, num_layers * hidden_size]``."""
        return (self.weight.detach() / self.sizes).to(self.weight.dtype)


def final_norm(model: Any, shape: HeadLayerShape) -> nn.RMSNorm:
    """A norm whose gains begin in the proportions of those before the target's own head.

    Their mean size is 1: gains as large as the target's make logits as sharp as its own from the first step,
    when they are still wrong.
    """
    found = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
    norm = getattr(model.get_decoder(), "norm", None)
    if norm is None:
        return found
    weight = next(model.parameters())
    ones = torch.ones(1, shape.hidden_size, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        # By what it does: families store gains in several ways. A norm that takes off the mean gives nothing.
        gains = (norm(ones) - norm(-ones))[0].float() / 2
        if gains.shape == found.weight.shape and bool(gains.any()):
            found.weight.copy_(gains / gains.abs().mean())
    return found


def rotary(
    positions: torch.Tensor, shape: HeadLayerShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions, ``[*positions.shape, head_dim / 2]``."""
    half = shape.head_dim // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions.float()[..., None] / shape.rope_theta**exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads ``[..., head_dim]`` at the positions of the cosines and sines."""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
