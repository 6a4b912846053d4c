"""An EAGLE-3 head in training: one layer behind joined features, unrolled on its own outputs.

Li et al., *EAGLE-3*, arXiv 2503.01840: at depth s the feature of the last token is what the head itself gave
at depth s - 1 (training-time test). A row of depth s belongs to an anchor q, and stands for token q + 1 + s.
It sees the first depth's rows of anchors up to q, which are made of true features, and of each later depth
the row of its own anchor alone: a chain that was drafted behind q.

::

    depth 0 of anchors    0  1  ..  q        later depths of anchor q
    row of depth s sees   x  x  ..  x        1  2  ..  s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specray.train.heads.base import text_section, whole_number


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of a head's layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int


def eagle_shape(config: Any) -> EagleShape:
    """A layer as wide as the target's own, with the target's heads.

    Raises:
        ConfigError: the target's configuration lacks a size.
    """
    section = text_section(config)
    hidden, num_heads = whole_number(section, "hidden_size"), whole_number(section, "num_attention_heads")
    rope = getattr(section, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return EagleShape(
        hidden_size=hidden,
        intermediate_size=whole_number(section, "intermediate_size", 4 * hidden),
        num_heads=num_heads,
        num_kv_heads=whole_number(section, "num_key_value_heads", num_heads),
        head_dim=whole_number(section, "head_dim", hidden // num_heads),
        rope_theta=float(theta or 10_000.0),
        rms_norm_eps=float(getattr(section, "rms_norm_eps", None) or 1e-6),
        max_position_embeddings=whole_number(section, "max_position_embeddings", 2048),
    )


class _Layer(nn.Module):
    """The layer's parameters, under the authors' names."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, query, bias=False),
                "k_proj": nn.Linear(2 * hidden, key, bias=False),
                "v_proj": nn.Linear(2 * hidden, key, bias=False),
                "o_proj": nn.Linear(query, hidden, bias=False),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, hidden, bias=False),
            }
        )


class EagleHead(nn.Module):
    """Implements ``base.Head``.

    Args:
        model: the target, of transformers; its embedding is read and not trained, and its head's rows are
            what the head's own begin with.
        draft_ids: int64 ``[draft_vocab_size]``, ascending: the target's ids that can be proposed.
        feature_layers: layers of the target that it reads, in this order.
        num_depths: places ahead that are trained.
    """

    name = "eagle3"
    rank_acceptance: list[list[float]] | None = None
    target_embedding: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        model: Any,
        draft_ids: torch.Tensor,
        *,
        feature_layers: tuple[int, ...],
        num_depths: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.shape = shape = eagle_shape(model.config)
        self.feature_layers = feature_layers
        self.num_depths = num_depths
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = nn.Linear(len(feature_layers) * shape.hidden_size, shape.hidden_size, bias=False)
            self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        rows = model.get_output_embeddings().weight.detach()[draft_ids]
        # Rows of tokens: the optimizer steps what has "embed" in its name as it does embeddings.
        self.unembedding = nn.Parameter(rows.clone())
        self.register_buffer(
            "target_embedding", model.get_input_embeddings().weight.detach(), persistent=False
        )
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @property
    def module(self) -> nn.Module:
        """See ``base.Head``."""
        return self

    def unroll(
        self, features: Mapping[int, torch.Tensor], token_ids: torch.Tensor, num_depths: int
    ) -> Sequence[torch.Tensor]:
        """See ``base.Head``."""
        joined = torch.cat([features[layer] for layer in self.feature_layers], -1)
        hidden = self.fc(joined.to(self.fc.weight.dtype))
        embedded = F.embedding(token_ids, self.target_embedding).to(hidden.dtype)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        logits = []
        for depth in range(num_depths):
            num_anchors = min(hidden.shape[1], token_ids.shape[1] - depth)
            own = embedded[:, depth : depth + num_anchors]
            hidden = self._step(own, hidden[:, :num_anchors], depth, seen)
            logits.append(F.linear(self.norm(hidden), self.unembedding))
        return logits

    def tensors(self) -> dict[str, torch.Tensor]:
        """See ``base.Head``."""
        tensors = {name: tensor.detach() for name, tensor in self.named_parameters()}
        tensors["lm_head.weight"] = tensors.pop("unembedding")
        vocab_size = len(self.target_embedding)
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[self.draft_ids.cpu()] = True
        tensors["t2d"] = known
        tensors["d2t"] = self.draft_ids.cpu() - torch.arange(len(self.draft_ids))
        return tensors

    def config(self, target: str) -> dict[str, Any]:
        """See ``base.Head``."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "base_model_name_or_path": target,
            "hidden_size": shape.hidden_size,
            "target_hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": len(self.target_embedding),
            "draft_vocab_size": len(self.draft_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
            "norm_before_residual": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    def _step(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        depth: int,
        seen: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """One depth of all anchors; its keys and values join ``seen``."""
        layer = self.midlayer
        entering = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
        query, key, value = (
            layer.self_attn[name](entering).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        cos, sin = self._rotary(depth, hidden)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        seen.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        attended = chain_attention(query, seen).transpose(1, 2).flatten(2)
        hidden = hidden + layer.self_attn["o_proj"](attended)
        normed = layer.post_attention_layernorm(hidden)
        gated = F.silu(layer.mlp["gate_proj"](normed)) * layer.mlp["up_proj"](normed)
        output: torch.Tensor = hidden + layer.mlp["down_proj"](gated)
        return output

    def _rotary(self, depth: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of anchor q stands for token q + 1 + depth, whose entry is at position q + depth."""
        half = self.shape.head_dim // 2
        positions = torch.arange(depth, depth + like.shape[1], device=like.device, dtype=torch.float32)
        exponents = torch.arange(half, device=like.device, dtype=torch.float32) / half
        angles = positions[:, None] / self.shape.rope_theta**exponents
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def chain_attention(query: torch.Tensor, seen: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention of one depth's rows to keys and values of all depths so far, its own the last.

    Args:
        query: ``[num_rows, num_heads, num_anchors, head_dim]``.
        seen: of each depth, keys and values of at least as many anchors.
    """
    num_anchors = query.shape[2]
    scale = query.shape[3] ** -0.5
    first_keys, first_values = (part[:, :, :num_anchors] for part in seen[0])
    later = [(keys[:, :, :num_anchors], values[:, :, :num_anchors]) for keys, values in seen[1:]]
    hidden = torch.ones(num_anchors, num_anchors, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ first_keys.transpose(2, 3)).float().masked_fill(hidden, float("-inf"))
    own = [(query * keys).float().sum(-1, keepdim=True) for keys, _ in later]
    probs = (torch.cat((scores, *own), -1) * scale).softmax(-1).to(query.dtype)
    attended: torch.Tensor = probs[..., :num_anchors] @ first_values
    for depth, (_, values) in enumerate(later):
        attended = attended + probs[..., num_anchors + depth, None] * values
    return attended


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
