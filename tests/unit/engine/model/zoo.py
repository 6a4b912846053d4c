"""Tiny models of many families: which are served, and what the others are refused with.

Sizes are those of ``checkpoints.HIDDEN``; sliding windows and chunks are shorter than the tested prompts.
"""

from __future__ import annotations

from tests.unit.engine.model.families.family import (
    ALONE,
    DELTA,
    EXPERTS,
    GROUPED,
    LATENT,
    LATENT_EXPERTS,
    LINEAR,
    MAMBA,
    OWN_CODE,
    QWEN_VISION,
    SLIDING,
    SPARSE,
    THREE_AXES,
    TILES,
    VISION,
    Family,
)
from tests.unit.engine.model.families.more import MORE

QUICK = (
    "qwen2_moe-sliding",
    "llama4-chunked",
    "laguna",
    "falcon_h1",
    "qwen3_next",
    "qwen3_5",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "gemma3",
)
"""Families that every run of the tests tries: those that were served wrongly or failed with a traceback."""

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
    "gemma2": Family("gemma2", {**GROUPED, **SLIDING, "head_dim": 8, "attn_logit_softcapping": 3.0}),
    "vaultgemma": Family("vaultgemma", {**GROUPED, **SLIDING, "head_dim": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": Family("gemma3_text", {**GROUPED, **SLIDING, "head_dim": 16}),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **GROUPED,
            **SLIDING,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-shared": Family(
        "gemma4_text",
        {
            **GROUPED,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
        },
    ),
    "gpt_oss": Family(
        "gpt_oss", {**GROUPED, **SLIDING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            **SLIDING,
            **GROUPED,
            "head_dim": 12,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "deepseek_v2": Family("deepseek_v2", {**LATENT_EXPERTS, "topk_method": "greedy"}),
    "deepseek_v3": Family("deepseek_v3", LATENT_EXPERTS),
    "minicpm3": Family("minicpm3", LATENT),
    "youtu": Family("youtu", LATENT),
    "glm4_moe_lite": Family("glm4_moe_lite", {**LATENT_EXPERTS, "mlp_layer_types": ["dense", "sparse"]}),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **LATENT,
            "head_dim": 4,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "deepseek_v32": Family(
        "deepseek_v32", {**LATENT_EXPERTS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}, SPARSE
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa", {**LATENT_EXPERTS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}, SPARSE
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {**GROUPED, **EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5": Family("qwen3_5_text", {**GROUPED, **LINEAR, "head_dim": 16}),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text",
        {**GROUPED, **EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5-multimodal": Family("qwen3_5", {**GROUPED, **LINEAR, "head_dim": 16}, other_parts=QWEN_VISION),
    "qwen3_5_moe-multimodal": Family(
        "qwen3_5_moe",
        {**GROUPED, **EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 24},
        other_parts=QWEN_VISION,
    ),
    "olmo_hybrid": Family("olmo_hybrid", {**GROUPED, **LINEAR}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            **GROUPED,
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bamba": Family("bamba", {**GROUPED, **MAMBA, "attn_layer_indices": [1]}),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **GROUPED,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "n_routed_experts": 4,
        },
    ),
    "zamba2": Family(
        "zamba2",
        {
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
        },
    ),
    "kimi_linear": Family("kimi_linear", {**DELTA, "linear_head_dim": 8, "linear_num_heads": 4}),
    "bailing_hybrid": Family("bailing_hybrid", {**DELTA, "head_dim": 8, "n_group": 2, "topk_group": 1}),
    "lfm2": Family("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "lfm2_moe": Family(
        "lfm2_moe",
        {**GROUPED, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "lfm3": Family("lfm3", {**GROUPED, "layer_types": ["conv", "full_attention"], "head_dim": 8}),
    "jamba": Family(
        "jamba",
        {**GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
        "it has recurrent layers, which transformers begins anew with each chunk of a prompt",
    ),
    "minimax": Family(
        "minimax",
        GROUPED,
        "it has recurrent layers, whose states transformers keeps in a way of this model's own",
    ),
    "mamba": Family("mamba", {"state_size": 4}, ALONE),
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
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings": 128,
        },
        max_model_len=128,
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
    "mistral3": Family(
        "mistral3",
        {**GROUPED, "model_type": "mistral", "head_dim": 8, "tie_word_embeddings": False},
        other_parts={
            "vision_config": {"model_type": "pixtral", **VISION},
            "image_token_index": 90,
            "tie_word_embeddings": False,
        },
    ),
    "llava": Family(
        "llava",
        {**GROUPED, "model_type": "llama"},
        other_parts={"vision_config": {"model_type": "clip_vision_model", **TILES}, "image_token_index": 90},
    ),
    "qwen2_vl": Family("qwen2_vl", {**GROUPED, **THREE_AXES}, other_parts=QWEN_VISION),
    "qwen2_5_vl": Family("qwen2_5_vl", {**GROUPED, **THREE_AXES}, other_parts=QWEN_VISION),
    "qwen3_vl": Family("qwen3_vl", {**GROUPED, **THREE_AXES, "head_dim": 8}, other_parts=QWEN_VISION),
    "qwen3_vl_moe": Family(
        "qwen3_vl_moe", {**GROUPED, **EXPERTS, **THREE_AXES, "head_dim": 8}, other_parts=QWEN_VISION
    ),
    "gemma3-multimodal": Family(
        "gemma3",
        {**GROUPED, **SLIDING, "head_dim": 8},
        other_parts={
            "vision_config": TILES,
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
    ),
    "llama4-multimodal": Family(
        "llama4",
        {
            **GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 128,
            "interleave_moe_layer_step": 1,
        },
        other_parts={
            "vision_config": {
                **TILES,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 90,
        },
    ),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}, OWN_CODE),
    "falcon": Family("falcon", {}, OWN_CODE),
    "gptj": Family("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, OWN_CODE),
    **MORE,
}
