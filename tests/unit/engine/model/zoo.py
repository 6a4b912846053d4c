"""Tiny models of many families: which are served, and what the others are refused with.

Sizes are those of ``checkpoints.HIDDEN``; sliding windows and chunks are shorter than the tested prompts.
"""

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


def family(
    model_type: str,
    /,
    *shared: dict[str, Any],
    refusal: str | None = None,
    max_model_len: int = 128,
    other_parts: dict[str, Any] | None = None,
    **own: Any,
) -> Family:
    """A row of the table: fields that several families share, and its own."""
    values = {name: value for part in (*shared, own) for name, value in part.items()}
    return Family(model_type, values, refusal, max_model_len, other_parts or {})


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
PARTIAL = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 128,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
FALCON = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
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
SPARSE = "it has sparse attention"
OWN_CODE = "its attention is code of its own"
LAYERS = {**GROUPED, "num_hidden_layers": 4}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
OWN_MASK = "its attention has a mask of its own"
OFF = "over the block cache its logits are off by"

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

# fmt: off
FAMILIES: dict[str, Family] = {
    "llama": family("llama", GROUPED),
    "mistral-windowed": family("mistral", GROUPED, sliding_window=8),
    "qwen2-sliding": family("qwen2", GROUPED, SLIDING, use_sliding_window=True, max_window_layers=1),
    "qwen3": family("qwen3", GROUPED, head_dim=16),
    "qwen2_moe": family("qwen2_moe", GROUPED, EXPERTS, shared_expert_intermediate_size=24,
        decoder_sparse_step=1),
    "qwen2_moe-sliding": family("qwen2_moe", GROUPED, EXPERTS, SLIDING, shared_expert_intermediate_size=24,
        use_sliding_window=True, max_window_layers=1),
    "qwen3_moe": family("qwen3_moe", GROUPED, EXPERTS, head_dim=16),
    "mixtral": family("mixtral", GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-windowed": family("mixtral", GROUPED, num_local_experts=4, sliding_window=8),
    "llama4": family("llama4_text", GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=4,
        attention_chunk_size=128, interleave_moe_layer_step=1),
    "llama4-chunked": family("llama4_text", GROUPED, head_dim=8, intermediate_size_mlp=48,
        num_local_experts=4, attention_chunk_size=16, interleave_moe_layer_step=1,
        refusal="its attention is cut into chunks of 16 tokens and max_model_len is 128; "
        "allowed: max_model_len up to 16"),
    "laguna": family("laguna", GROUPED, EXPERTS, SLIDING, head_dim=8, num_attention_heads_per_layer=[4, 8],
        mlp_layer_types=["dense", "sparse"], shared_expert_intermediate_size=24),
    "gemma": family("gemma", GROUPED, head_dim=16),
    "gemma2": family("gemma2", GROUPED, SLIDING, head_dim=8, attn_logit_softcapping=3.0),
    "vaultgemma": family("vaultgemma", GROUPED, SLIDING, head_dim=8, attn_logit_softcapping=3.0),
    "gemma3": family("gemma3_text", GROUPED, SLIDING, head_dim=16),
    "gemma3n": family("gemma3n_text", GROUPED, head_dim=8, sliding_window=8, num_hidden_layers=4,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=[48] * 4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, laurel_rank=4, altup_num_inputs=2),
    "gemma4": family("gemma4_text", GROUPED, SLIDING, head_dim=8, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0),
    "gemma4-shared": family("gemma4_text", GROUPED, head_dim=8, global_head_dim=16, sliding_window=8,
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=96),
    "gpt_oss": family("gpt_oss", GROUPED, SLIDING, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "mimo_v2_flash": family("mimo_v2_flash", SLIDING, GROUPED, head_dim=12, v_head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, mlp_layer_types=["dense", "sparse"]),
    "deepseek_v2": family("deepseek_v2", LATENT_EXPERTS, topk_method="greedy"),
    "deepseek_v3": family("deepseek_v3", LATENT_EXPERTS),
    "minicpm3": family("minicpm3", LATENT),
    "youtu": family("youtu", LATENT),
    "glm4_moe_lite": family("glm4_moe_lite", LATENT_EXPERTS, mlp_layer_types=["dense", "sparse"]),
    "longcat_flash": family("longcat_flash", LATENT, head_dim=4, num_layers=2, num_hidden_layers=4,
        ffn_hidden_size=48, expert_ffn_hidden_size=24, n_routed_experts=4, zero_expert_num=2, moe_topk=2),
    "deepseek_v32": family("deepseek_v32", LATENT_EXPERTS, index_n_heads=2, index_head_dim=16, index_topk=8,
        refusal=SPARSE),
    "glm_moe_dsa": family("glm_moe_dsa", LATENT_EXPERTS, index_n_heads=2, index_head_dim=16, index_topk=8,
        refusal=SPARSE),
    "qwen4_exp": family("qwen4_exp_text", GROUPED, EXPERTS, LINEAR, head_dim=16, hc_count=2, hc_lowrank=8,
        layer_types=["linear_attention", "indexed_attention"], shared_expert_intermediate_size=24,
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
        indexer_compress_ratio=4, ngram_vocab_size_base=64, split_ngram_parts=2, ple_embed_dim=16,
        heads_per_ngram=2,
        refusal="an index of their own and several residual streams (hyper-connections) and embeddings of"),
    "falcon_h1": family("falcon_h1", GROUPED, FALCON, embedding_multiplier=3.0, lm_head_multiplier=0.7,
        mlp_multipliers=[0.8, 1.2], key_multiplier=0.5, attention_in_multiplier=1.1,
        attention_out_multiplier=0.9, ssm_multipliers=[0.7, 1.1, 0.8, 1.3, 0.9], ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.6),
    "falcon_h1-normed": family("falcon_h1", GROUPED, FALCON, mamba_rms_norm=True, mamba_n_groups=2,
        projectors_bias=True, attention_bias=True, mlp_bias=True),
    "qwen3_next": family("qwen3_next", GROUPED, EXPERTS, LINEAR, head_dim=16,
        shared_expert_intermediate_size=24),
    "qwen3_5": family("qwen3_5_text", GROUPED, LINEAR, head_dim=16),
    "qwen3_5_moe": family("qwen3_5_moe_text", GROUPED, EXPERTS, LINEAR, head_dim=16,
        shared_expert_intermediate_size=24),
    "qwen3_5-multimodal": family("qwen3_5", GROUPED, LINEAR, head_dim=16, other_parts=QWEN_VISION),
    "qwen3_5_moe-multimodal": family("qwen3_5_moe", GROUPED, EXPERTS, LINEAR, head_dim=16,
        shared_expert_intermediate_size=24, other_parts=QWEN_VISION),
    "olmo_hybrid": family("olmo_hybrid", GROUPED, LINEAR),
    "granitemoehybrid": family("granitemoehybrid", GROUPED, MAMBA, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=4.0),
    "granitemoehybrid-dense": family("granitemoehybrid", GROUPED, MAMBA, num_local_experts=0,
        shared_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        position_embedding_type="rope"),
    "bamba": family("bamba", GROUPED, MAMBA, attn_layer_indices=[1], mamba_n_groups=2, mamba_proj_bias=True,
        attention_bias=True),
    "nemotron_h": family("nemotron_h", GROUPED, head_dim=8, num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], ssm_state_size=8,
        mamba_num_heads=8, mamba_head_dim=8, n_groups=2, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24, n_routed_experts=4),
    "nemotron_h-latent": family("nemotron_h", GROUPED, head_dim=8, num_hidden_layers=4, mlp_bias=True,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"], ssm_state_size=8,
        mamba_num_heads=8, mamba_head_dim=8, n_groups=2, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24, n_routed_experts=4, moe_latent_size=16),
    "zamba2": family("zamba2", num_key_value_heads=4, layers_block_type=["linear_attention", "hybrid"],
        mamba_d_state=8, n_mamba_heads=4,
        refusal="its recurrent layers read what a transformer that several of them share makes"),
    # Wide enough that CPUs capture steps.
    "kimi_linear": family("kimi_linear", DELTA, linear_head_dim=8, linear_num_heads=4, intermediate_size=64,
        moe_intermediate_size=32),
    "bailing_hybrid": family("bailing_hybrid", DELTA, head_dim=8, n_group=2, topk_group=1,
        intermediate_size=64, moe_intermediate_size=32),
    "bailing_hybrid-unbounded": family("bailing_hybrid", DELTA, head_dim=8, n_group=1, topk_group=1,
        kda_safe_gate=False, attention_bias=True),
    "lfm2": family("lfm2", GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=16,
        conv_bias=True),
    "lfm2_moe": family("lfm2_moe", GROUPED, EXPERTS, layer_types=["conv", "full_attention"],
        num_dense_layers=1),
    "lfm3": family("lfm3", LAYERS, layer_types=["conv", "full_attention", "sliding_attention", "conv"],
        sliding_window=8, head_dim=8),
    "jamba": family("jamba", GROUPED, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=4,
        refusal="layers of Mamba 1; allowed: the gated delta rule, Kimi delta attention, Mamba 2"),
    "minimax": family("minimax", GROUPED, refusal="has recurrent layers of lightning attention; allowed: "),
    "mamba": family("mamba", state_size=4, refusal="it has recurrent layers of Mamba 1; allowed: "),
    "mamba2": family("mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=1,
        refusal="it has recurrent layers alone"),
    "phi": family("phi", GROUPED),
    "phi3": family("phi3", GROUPED, sliding_window=8),
    "phi3-partial": family("phi3", GROUPED, rope_parameters=PARTIAL, original_max_position_embeddings=128,
        max_model_len=128),
    "olmo": family("olmo", GROUPED),
    "olmo2": family("olmo2", GROUPED),
    "olmo3": family("olmo3", GROUPED, SLIDING),
    "gpt2": family("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt_neox": family("gpt_neox"),
    "gpt_bigcode": family("gpt_bigcode", n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "cohere": family("cohere", GROUPED),
    "cohere2": family("cohere2", GROUPED, SLIDING, head_dim=8),
    "starcoder2": family("starcoder2", GROUPED, sliding_window=8),
    "smollm3": family("smollm3", GROUPED, no_rope_layers=[1, 0]),
    "granite": family("granite", GROUPED, embedding_multiplier=12.0, attention_multiplier=0.2,
        residual_multiplier=0.22, logits_scaling=4.0),
    "exaone4": family("exaone4", GROUPED, SLIDING, head_dim=8),
    "glm4": family("glm4", GROUPED, head_dim=8),
    "ernie4_5": family("ernie4_5", GROUPED, head_dim=8),
    "opt": family("opt", ffn_dim=48, word_embed_proj_dim=32),
    "mistral3": family("mistral3", GROUPED, model_type="mistral", head_dim=8, tie_word_embeddings=False,
        other_parts={"vision_config": {"model_type": "pixtral", **VISION}, "image_token_index": 90,
        "tie_word_embeddings": False}),
    "llava": family("llava", GROUPED, model_type="llama",
        other_parts={"vision_config": {"model_type": "clip_vision_model", **TILES}, "image_token_index": 90}),
    "qwen2_vl": family("qwen2_vl", GROUPED, THREE_AXES, other_parts=QWEN_VISION),
    "qwen2_5_vl": family("qwen2_5_vl", GROUPED, THREE_AXES, other_parts=QWEN_VISION),
    "qwen3_vl": family("qwen3_vl", GROUPED, THREE_AXES, head_dim=8, other_parts=QWEN_VISION),
    "qwen3_vl_moe": family("qwen3_vl_moe", GROUPED, EXPERTS, THREE_AXES, head_dim=8, other_parts=QWEN_VISION),
    "gemma3-multimodal": family("gemma3", GROUPED, SLIDING, head_dim=8,
        other_parts={"vision_config": TILES, "mm_tokens_per_image": 4, "image_token_index": 90,
        "boi_token_index": 91, "eoi_token_index": 92}),
    "llama4-multimodal": family("llama4", GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=4,
        attention_chunk_size=128, interleave_moe_layer_step=1,
        other_parts={"vision_config": {**TILES, "vision_output_dim": 32, "projector_input_dim": 32,
        "projector_output_dim": 32}, "image_token_index": 90}),
    "bloom": family("bloom", n_layer=2, n_head=4, refusal=OWN_CODE),
    "falcon": family("falcon", refusal=OWN_CODE),
    "gptj": family("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=8, refusal=OWN_CODE),
    # Layers of four, so that each kind of a pattern comes twice.
    "afmoe": family("afmoe", LAYERS, WINDOWED, head_dim=8, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, num_shared_experts=1, num_dense_layers=1),
    "apertus": family("apertus", LAYERS),
    "arcee": family("arcee", LAYERS, head_dim=8),
    "aria_text": family("aria_text", LAYERS, head_dim=8, moe_num_experts=4, moe_topk=2,
        moe_num_shared_experts=1),
    "biogpt": family("biogpt", num_hidden_layers=4),
    "bitnet": family("bitnet", LAYERS),
    "cohere2_moe": family("cohere2_moe", LAYERS, WINDOWED, head_dim=8, num_experts=4, num_experts_per_tok=2,
        num_shared_experts=1, prefix_dense_intermediate_size=48,
        mlp_layer_types=["sparse", "sparse", "sparse", "sparse"]),
    "cwm": family("cwm", LAYERS, WINDOWED, head_dim=8),
    "dots1": family("dots1", LAYERS, WINDOWED, ROUTED, moe_intermediate_size=24, n_routed_experts=4,
        n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
    "ernie4_5_moe": family("ernie4_5_moe", LAYERS, moe_intermediate_size=24, num_experts=4, moe_num_experts=4,
        num_experts_per_tok=2, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=0),
    "exaone_moe": family("exaone_moe", LAYERS, WINDOWED, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, num_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"]),
    "flex_olmo": family("flex_olmo", LAYERS, ROUTED, num_experts=4),
    "flint": family("flint", LAYERS, WINDOWED, head_dim=8, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=24),
    "gemma4_unified_text": family("gemma4_unified_text", LAYERS, WINDOWED, head_dim=8),
    "glm": family("glm", LAYERS, head_dim=8),
    "glm4_moe": family("glm4_moe", LAYERS, ROUTED, moe_intermediate_size=24, n_routed_experts=4, n_group=2,
        topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
    "granite_swa": family("granite_swa", LAYERS, WINDOWED),
    "granitemoe": family("granitemoe", LAYERS, ROUTED),
    "granitemoe_swa": family("granitemoe_swa", LAYERS, WINDOWED, ROUTED, shared_intermediate_size=24),
    "granitemoeshared": family("granitemoeshared", LAYERS, ROUTED, shared_intermediate_size=24),
    "helium": family("helium", LAYERS, head_dim=8),
    "hunyuan_v1_dense": family("hunyuan_v1_dense", LAYERS, head_dim=8),
    "hunyuan_v1_moe": family("hunyuan_v1_moe", LAYERS, ROUTED, head_dim=8, num_experts=4, moe_topk=2),
    "hy_v3": family("hy_v3", LAYERS, ROUTED, head_dim=8, moe_intermediate_size=24, num_experts=4,
        num_shared_experts=1, mlp_layer_types=["dense", "sparse", "dense", "sparse"]),
    "hyperclovax": family("hyperclovax", LAYERS, head_dim=8),
    "internlm3": family("internlm3", LAYERS, head_dim=8),
    "iquestcoder": family("iquestcoder", LAYERS, head_dim=8),
    "jais2": family("jais2", LAYERS, head_dim=8),
    "jetmoe": family("jetmoe", LAYERS, ROUTED, head_dim=8),
    "kolibri1": family("kolibri1", LAYERS, WINDOWED, ROUTED, head_dim=8, moe_intermediate_size=24,
        num_experts=4, shared_expert_intermediate_size=24),
    "mellum": family("mellum", LAYERS, WINDOWED, ROUTED, head_dim=8, moe_intermediate_size=24, num_experts=4,
        mlp_layer_types=["sparse", "sparse", "sparse", "sparse"]),
    "minimax_m2": family("minimax_m2", LAYERS, ROUTED, head_dim=8, num_experts=4),
    "ministral": family("ministral", LAYERS, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"]),
    "ministral3": family("ministral3", LAYERS, head_dim=8, sliding_window=8),
    "nanochat": family("nanochat", LAYERS),
    "olmoe": family("olmoe", LAYERS, num_experts=4, num_experts_per_tok=2),
    "phimoe": family("phimoe", LAYERS, ROUTED),
    "seed_oss": family("seed_oss", LAYERS, head_dim=8),
    "solar_open": family("solar_open", LAYERS, head_dim=8, moe_intermediate_size=24, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1),
    "codegen": family("codegen", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, refusal=OWN_CODE),
    "gpt_neox_japanese": family("gpt_neox_japanese", refusal=OWN_CODE),
    "mpt": family("mpt", d_model=32, n_layers=2, n_heads=4, refusal=OWN_CODE),
    "diffllama": family("diffllama", LAYERS, refusal=OFF),
    "doge": family("doge", LAYERS, refusal=OWN_MASK),
}
# fmt: on
