"""Tiny mixtures of experts, one or more for each way to route and to lie in files."""

from __future__ import annotations

from typing import Any

_LAYERS = {"num_key_value_heads": 2, "num_hidden_layers": 3}
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GROUPED = {
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
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
_SHARED = {"shared_expert_intermediate_size": 16}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

MIXTURES: dict[str, dict[str, Any]] = {
    "aria_text": {**_LAYERS, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2},
    "dots1": {**_LAYERS, **_WINDOWS, **_GROUPED, "attention_bias": True},
    "ernie4_5_moe": {
        **_LAYERS,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_norm_min": 0.4,
    },
    "exaone_moe": {
        **_LAYERS,
        **_WINDOWS,
        **_EXPERTS,
        **_SPARSE,
        "num_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 16,
    },
    "flex_olmo": {**_LAYERS, "num_experts": 6, "num_experts_per_tok": 3},
    "flint": {**_LAYERS, **_WINDOWS, **_EXPERTS, **_SHARED, "mlp_only_layers": [0], "head_dim": 16},
    "glm4_moe": {**_LAYERS, **_GROUPED, "use_qk_norm": True, "attention_bias": True, "head_dim": 16},
    "granitemoe": {**_LAYERS, **_LOCAL, **_GRANITE},
    "granitemoe_swa": {
        **_LAYERS,
        **_LOCAL,
        **_GRANITE,
        **_WINDOWS,
        "shared_intermediate_size": 16,
        "layer_rope_theta": [100.0, 0, 10000.0],
    },
    "granitemoeshared": {**_LAYERS, **_LOCAL, **_GRANITE, "shared_intermediate_size": 16},
    "hy_v3": {**_LAYERS, **_EXPERTS, **_SPARSE, "num_shared_experts": 2, "mlp_bias": True, "head_dim": 16},
    "kolibri1": {**_LAYERS, **_WINDOWS, **_EXPERTS, **_SHARED, "norm_topk_prob": True, "head_dim": 16},
    "mellum": {
        **_LAYERS,
        **_WINDOWS,
        **_EXPERTS,
        **_SPARSE,
        "head_dim": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "minimax_m2": {**_LAYERS, **_LOCAL, "head_dim": 8, "rope_parameters": _PARTIAL},
    "olmoe": {**_LAYERS, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen2_moe": {**_LAYERS, **_EXPERTS, **_SHARED, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "solar_open": {**_LAYERS, **_GROUPED, "head_dim": 16, "attention_bias": True},
}
"""Fields of configurations beside those that all tiny checkpoints share."""
