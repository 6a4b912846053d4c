"""Models of latent attention: DeepSeek's, and those that have it from there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specray.engine.model.layers.latent.config import LatentAttention

LATENT = frozenset(
    {
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "kimi_linear",
        "longcat_flash",
        "minicpm3",
        "youtu",
    }
)
"""Types with such attention in each layer that attends."""
_WITH_OWN_HALVES = frozenset({"kimi_linear", "minicpm3"})
"""Types whose numbers that are rotated together lie half of the rotated ones apart, or that rotate none."""


def latent_switches(config: Any) -> dict[str, Any]:
    """What these types have that Llama has not."""
    latent = LatentAttention(
        config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim, _query_rank(config)
    )
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    has_bias = bool(config.attention_bias)
    switches = {
        "latent": latent,
        "num_key_value_heads": 1,
        "head_dim": config.qk_rope_head_dim,
        "query_scale": head_dim**-0.5 * _context_scale(getattr(config, "rope_parameters", None) or {}),
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "has_neighbour_pairs": config.model_type not in _WITH_OWN_HALVES
        and bool(getattr(config, "rope_interleave", True)),
    }
    if config.model_type == "longcat_flash":
        switches["query_scale"] *= math.sqrt(config.hidden_size / config.q_lora_rank)
        factor = math.sqrt(config.hidden_size / config.kv_lora_rank)
        switches["latent"] = replace(latent, latent_factor=factor)
    if config.model_type == "minicpm3":
        switches |= {
            "embedding_scale": float(config.scale_emb),
            "has_scaled_embedding": True,
            "residual_scale": config.scale_depth / math.sqrt(config.num_hidden_layers),
            "logit_scale": 1.0 / config.logits_scaling,
        }
    return switches


def can_be_latent(config: Any) -> bool:
    """Whether the numbers make sense together."""
    rank = _query_rank(config)
    sizes = (
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        # A rank that is no number makes queries of the hidden state.
        1 if rank is None else rank,
    )
    if min(sizes) < 1 or config.qk_rope_head_dim % 2:
        return False
    if config.model_type == "minicpm3" and not (config.scale_depth > 0 and config.logits_scaling != 0):
        return False
    if config.model_type == "longcat_flash":
        known = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
        # The router's bias is no part of what transformers computes.
        return (config.qk_head_dim, config.head_dim) == known and not getattr(config, "router_bias", False)
    return getattr(config, "topk_method", None) in (None, "greedy", "group_limited_greedy")


def _query_rank(config: Any) -> int | None:
    rank: int | None = getattr(config, "q_lora_rank", None)
    return rank


def _context_scale(rope: Mapping[str, Any]) -> float:
    """Factor on the dot products of a model whose context was extended (YaRN, 2023)."""
    factor, share = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not share or factor <= 1:
        return 1.0
    return float((0.1 * share * math.log(factor) + 1.0) ** 2)
