"""Tiny models of the families that are read from GGUF: as transformers builds them, and as files.

The headers hold what ``convert_hf_to_gguf.py`` of llama.cpp writes for the same configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.unit.models.tiny_models import TOKENS

Header = Mapping[str, Any]

PROMPT = tuple((7 * index * index + 31 * index + 11) % (len(TOKENS) - 2) + 2 for index in range(40))
"""Token ids, more than any window of the models has."""
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, CONTEXT, WINDOW = 64, 2, 4, 2, 16, 96, 512, 8
_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HEADER: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "feed_forward_length": MLP,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
}
_RMS_HEADER = {**_HEADER, "attention.layer_norm_rms_epsilon": 1e-5}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model: its configuration, and the header of its file."""

    architecture: str
    """Name in GGUF."""
    config: Header
    """``config.json`` of the original."""
    header: Header
    """Keys without the architecture's name before them."""
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Tensors of rotary factors by their names in GGUF."""
    prompt_len: int = 40
    """Tokens of ``PROMPT`` for the comparison with llama.cpp."""
    num_tokens: int = 12
    """Tokens that it continues them with."""


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


def _llama(rope: Header, header: Header, context: int = CONTEXT, **more: Any) -> TinyModel:
    sizes = {**_SIZES, "rms_norm_eps": 1e-5, "max_position_embeddings": context}
    config = {"model_type": "llama", **sizes, "rope_parameters": rope}
    sizes = {**_RMS_HEADER, "vocab_size": len(TOKENS), "context_length": context}
    heads = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    keys = {**sizes, **heads, "rope.dimension_count": HEAD_DIM, **header}
    return TinyModel("llama", config, keys, **more)


def _qwen(model_type: str, architecture: str, config: Header, header: Header) -> TinyModel:
    values = {"model_type": model_type, **_SIZES, "rms_norm_eps": 1e-5, "rope_parameters": _rope(1e6)}
    return TinyModel(architecture, values | config, {**_RMS_HEADER, "rope.freq_base": 1e6, **header})


def _phi3(config: Header, header: Header, **more: Any) -> TinyModel:
    values = {
        "model_type": "phi3",
        **_SIZES,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": CONTEXT,
        "rope_parameters": _rope(1e4),
    }
    keys = {
        **_RMS_HEADER,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 1e4,
        "rope.scaling.original_context_length": CONTEXT,
        "attention.sliding_window": 0,
    }
    return TinyModel("phi3", values | config, keys | header, **more)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_YARN_HEADER = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# What the converter computes of them for a base of 10,000 and heads of 16.
_LLAMA3_FACTORS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.681482315063477, 8.0)
_SHORT = tuple(1.0 + 0.05 * index for index in range(6))
_LONG = tuple(1.0 + 0.5 * index for index in range(6))
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_EXPERTS_HEADER = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_GEMMA = {
    **_SIZES,
    "num_hidden_layers": 7,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": HEAD_DIM,
}
_GEMMA_HEADER = {
    **_HEADER,
    "block_count": 7,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.sliding_window": WINDOW,
}
_GEMMA2 = {
    "model_type": "gemma2",
    **_GEMMA,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 15.0,
    "rope_parameters": _rope(1e4),
}
_GEMMA2_HEADER = {**_GEMMA_HEADER, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}


_QWEN35 = {
    **_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": _rope(1e6, partial_rotary_factor=0.5, mrope_section=[3, 3, 2], mrope_interleaved=True),
}
_QWEN35_HEADER = {
    **_HEADER,
    "block_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.recurrent_layers": [True, False, True, False],
    "full_attention_interval": 4,
    "rope.freq_base": 1e6,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
_NO_MLP = {"feed_forward_length": None}


def _gemma3(full: Header, header: Header, **config: Any) -> TinyModel:
    ropes = {"full_attention": full, "sliding_attention": _rope(1e4)}
    values = {"model_type": "gemma3_text", **_GEMMA, "rope_parameters": ropes, **config}
    bases = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    return TinyModel("gemma3", values, {**_GEMMA_HEADER, **bases, **header})


MODELS: dict[str, TinyModel] = {
    "llama": _llama(_rope(5e5), {"rope.freq_base": 5e5}),
    "llama-linear": _llama(
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope.freq_base": 1e4, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-yarn": _llama({"rope_theta": 1e4, **_YARN}, {"rope.freq_base": 1e4, **_YARN_HEADER}),
    "llama-llama3": _llama(
        {"rope_theta": 1e4, **_LLAMA3},
        {"rope.freq_base": 1e4},
        context=131_072,
        factors={"rope_freqs.weight": _LLAMA3_FACTORS},
    ),
    "qwen2": _qwen("qwen2", "qwen2", {}, {}),
    "qwen2-yarn": _qwen("qwen2", "qwen2", {"rope_parameters": {"rope_theta": 1e6, **_YARN}}, _YARN_HEADER),
    "qwen2moe": _qwen(
        "qwen2_moe",
        "qwen2moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
        {**_EXPERTS_HEADER, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3": _qwen(
        "qwen3", "qwen3", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}
    ),
    "qwen3moe": _qwen(
        "qwen3_moe",
        "qwen3moe",
        {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "rope_parameters": {"rope_theta": 1e6, **_YARN}},
        {**_EXPERTS_HEADER, **_YARN_HEADER, "attention.key_length": 32, "attention.value_length": 32},
    ),
    "phi3": _phi3({}, {}),
    # llama.cpp leaves the window out, so that it computes the same only within it.
    "phi3-windowed": _phi3(
        {"sliding_window": WINDOW}, {"attention.sliding_window": WINDOW}, prompt_len=5, num_tokens=4
    ),
    "phi3-longrope": _phi3(
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": list(_SHORT),
                "long_factor": list(_LONG),
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 256,
            },
        },
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 256,
            "rope.scaling.attn_factor": 1.0606601717798212,
        },
        factors={"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
    ),
    "gemma2": TinyModel("gemma2", _GEMMA2, _GEMMA2_HEADER),
    # llama.cpp knows the scale of the 27B model's queries by its number of layers.
    "gemma2-27b": TinyModel(
        "gemma2",
        {**_GEMMA2, "num_hidden_layers": 46, "head_dim": 8, "query_pre_attn_scalar": HIDDEN // HEADS},
        {**_GEMMA2_HEADER, "block_count": 46, "attention.key_length": 8, "attention.value_length": 8},
    ),
    "gemma3": _gemma3(_rope(1e6), {}),
    "gemma3-linear": _gemma3(
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "starcoder2": TinyModel(
        "starcoder2",
        {
            "model_type": "starcoder2",
            **_SIZES,
            "norm_epsilon": 1e-4,
            "use_bias": True,
            "sliding_window": None,
            "rope_parameters": _rope(1e6),
        },
        {**_HEADER, "attention.layer_norm_epsilon": 1e-4, "rope.freq_base": 1e6},
    ),
    "gpt2": TinyModel(
        "gpt2",
        {
            "model_type": "gpt2",
            "vocab_size": len(TOKENS),
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": CONTEXT,
            "layer_norm_epsilon": 1e-4,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        {
            "block_count": LAYERS,
            "context_length": CONTEXT,
            "embedding_length": HIDDEN,
            "feed_forward_length": 4 * HIDDEN,
            "attention.head_count": HEADS,
            "attention.layer_norm_epsilon": 1e-4,
        },
    ),
    "lfm2": TinyModel(
        "lfm2",
        {
            "model_type": "lfm2",
            **_SIZES,
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
            "rope_parameters": _rope(1e6),
        },
        {
            **_RMS_HEADER,
            "vocab_size": len(TOKENS),
            "attention.head_count_kv": [0, KV_HEADS],
            "rope.freq_base": 1e6,
            "shortconv.l_cache": 3,
        },
    ),
    "qwen35": TinyModel("qwen35", {"model_type": "qwen3_5_text", **_QWEN35}, _QWEN35_HEADER),
    "qwen35moe": TinyModel(
        "qwen35moe",
        {
            **_QWEN35,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        {**_QWEN35_HEADER, **_NO_MLP, **_EXPERTS_HEADER, "expert_shared_feed_forward_length": 48},
    ),
}
"""By name: a family, and what is special in it."""

LIGHT_MODELS: dict[str, TinyModel] = {
    "olmoe": _qwen(
        "olmoe",
        "olmoe",
        # llama.cpp knows it with as many key heads as heads alone.
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "num_key_value_heads": HEADS,
        },
        {"expert_count": 8, "expert_used_count": 2, "attention.head_count_kv": HEADS},
    ),
    "glm4moe": _qwen(
        "glm4_moe",
        "glm4moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": HEAD_DIM,
            "rope_parameters": {**_rope(1e6), "partial_rotary_factor": 0.5},
        },
        {
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_feed_forward_length": 32,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "leading_dense_block_count": 1,
            "rope.dimension_count": HEAD_DIM // 2,
        },
    ),
    "gpt-oss": _qwen(
        "gpt_oss",
        "gpt-oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": HEAD_DIM,
            "sliding_window": WINDOW,
            # Without YaRN, whose limits llama.cpp rounds to whole numbers and the original does not.
        },
        {
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "feed_forward_length": 32,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.sliding_window": WINDOW,
        },
    ),
}
"""Models that are served from their files and not converted."""
