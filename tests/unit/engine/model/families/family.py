"""A family of models at tiny size, and the fields that several share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One family at tiny size."""

    model_type: str
    values: dict[str, Any] = field(default_factory=dict)
    """Fields of its configuration beside the common ones."""
    refusal: str | None = None
    """A part of the sentence that refuses it; None: it is served."""
    max_model_len: int = 128
    """Most tokens of a sequence."""
    other_parts: dict[str, Any] = field(default_factory=dict)
    """Fields beside the text part's configuration, of a multimodal model; empty: it is for text alone."""


GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LATENT_EXPERTS = {
    **LATENT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TILES = {**VISION, "image_size": 28, "patch_size": 14}
QWEN_VISION = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "embed_dim": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 32,
    },
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
DELTA = {
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
ALONE = "it has recurrent layers alone"
SPARSE = "it has sparse attention"
OWN_CODE = "its attention is code of its own"
