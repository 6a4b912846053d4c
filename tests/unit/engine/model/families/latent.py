"""Tiny models of latent attention, one or more for each way to make queries, to rotate and to route."""

from __future__ import annotations

from typing import Any

SIZES = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 32,
}

LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**SIZES, **ROUTED, "q_lora_rank": None, "mlp_bias": True},
    "deepseek_v2-grouped": {
        "model_type": "deepseek_v2",
        **SIZES,
        **ROUTED,
        "topk_method": "group_limited_greedy",
        "rope_parameters": _YARN,
    },
    "deepseek_v3": {**SIZES, **ROUTED, "rope_parameters": _YARN, "attention_bias": True},
    "deepseek_v3-halves": {
        "model_type": "deepseek_v3",
        **SIZES,
        **ROUTED,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_interleave": False,
        "attention_bias": True,
    },
    "glm4_moe_lite": {**SIZES, **ROUTED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "longcat_flash": {
        **SIZES,
        "num_hidden_layers": 4,
        "num_layers": 2,
        "head_dim": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 5,
        "zero_expert_num": 3,
        "moe_topk": 3,
        "routed_scaling_factor": 1.5,
        "rope_parameters": _YARN,
    },
    "minicpm3": {**SIZES, "tie_word_embeddings": False, "scale_emb": 3, "dim_model_base": 16},
    "youtu": {**SIZES, "tie_word_embeddings": True},
}
"""Fields of configurations beside those that all tiny checkpoints share."""
