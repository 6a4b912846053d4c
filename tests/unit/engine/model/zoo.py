"""Tiny models of many families: which are served, and what the others are refused with.

Sizes are those of ``checkpoints.HIDDEN``; sliding windows and chunks are shorter than the tested prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

QUICK = (
    "qwen2_moe-sliding",
    "llama4-chunked",
    "laguna",
    "falcon_h1",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "gemma3",
)
"""Families that every run of the tests tries: those that were served wrongly or failed with a traceback."""


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


GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
RECURRENT = "it has recurrent layers"
SPARSE = "it has sparse attention"
LATENT_REFUSED = "its keys and values are of different sizes (latent attention)"
OWN_CODE = "its attention is code of its own"
SINKS = "its attention has attention sinks (s_aux)"
SOFT_CAP = "its attention has a soft cap on its scores (softcap)"

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", GROUPED),
    "mistral-windowed": Family("mistral", {**GROUPED, "sliding_window": 8}),
    "qwen2-sliding": Family(
        "qwen2", {**GROUPED, **SLIDING, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3": Family("qwen3", {**GROUPED, "head_dim": 16}),
    "qwen2_moe": Family(
        "qwen2_moe", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}
    ),
    "qwen2_moe-sliding": Family(
        "qwen2_moe",
        {
            **GROUPED,
            **EXPERTS,
            **SLIDING,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": Family("qwen3_moe", {**GROUPED, **EXPERTS, "head_dim": 16}),
    "mixtral": Family("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-windowed": Family("mixtral", {**GROUPED, "num_local_experts": 4, "sliding_window": 8}),
    "llama4": Family(
        "llama4_text",
        {
            **GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 128,
            "interleave_moe_layer_step": 1,
        },
    ),
    "llama4-chunked": Family(
        "llama4_text",
        {
            **GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 1,
        },
        "its attention is cut into chunks of 16 tokens and max_model_len is 128; "
        "allowed: max_model_len up to 16",
    ),
    "laguna": Family(
        "laguna",
        {
            **GROUPED,
            **EXPERTS,
            **SLIDING,
            "head_dim": 8,
            "num_attention_heads_per_layer": [4, 8],
            "mlp_layer_types": ["dense", "sparse"],
            "shared_expert_intermediate_size": 24,
        },
    ),
    "gemma": Family("gemma", {**GROUPED, "head_dim": 16}),
    "gemma2": Family("gemma2", {**GROUPED, **SLIDING, "head_dim": 8}, SOFT_CAP),
    "gemma3": Family("gemma3_text", {**GROUPED, **SLIDING, "head_dim": 16}),
    "gpt_oss": Family("gpt_oss", {**GROUPED, **SLIDING, "head_dim": 8, "num_local_experts": 4}, SINKS),
    "deepseek_v2": Family("deepseek_v2", {**LATENT, "topk_method": "greedy"}, LATENT_REFUSED),
    "deepseek_v3": Family("deepseek_v3", LATENT, LATENT_REFUSED),
    "deepseek_v32": Family(
        "deepseek_v32", {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}, SPARSE
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa", {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}, SPARSE
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        RECURRENT,
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **GROUPED,
            **EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        RECURRENT,
    ),
    "mamba": Family("mamba", {"state_size": 4}, RECURRENT),
    "lfm2": Family(
        "lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}, RECURRENT
    ),
    "phi": Family("phi", GROUPED),
    "phi3": Family("phi3", {**GROUPED, "sliding_window": 8}),
    "phi3-partial": Family(
        "phi3",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0],
                "original_max_position_embeddings": 64,
            },
            "original_max_position_embeddings": 64,
        },
        max_model_len=64,
    ),
    "olmo": Family("olmo", GROUPED),
    "olmo2": Family("olmo2", GROUPED),
    "olmo3": Family("olmo3", {**GROUPED, **SLIDING}),
    "gpt2": Family("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt_neox": Family("gpt_neox"),
    "gpt_bigcode": Family("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "cohere": Family("cohere", GROUPED),
    "cohere2": Family("cohere2", {**GROUPED, **SLIDING, "head_dim": 8}),
    "starcoder2": Family("starcoder2", {**GROUPED, "sliding_window": 8}),
    "smollm3": Family("smollm3", {**GROUPED, "no_rope_layers": [1, 0]}),
    "granite": Family(
        "granite",
        {
            **GROUPED,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
        },
    ),
    "exaone4": Family("exaone4", {**GROUPED, **SLIDING, "head_dim": 8}),
    "glm4": Family("glm4", {**GROUPED, "head_dim": 8}),
    "ernie4_5": Family("ernie4_5", {**GROUPED, "head_dim": 8}),
    "opt": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}, OWN_CODE),
    "falcon": Family("falcon", {}, OWN_CODE),
    "gptj": Family("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, OWN_CODE),
}
