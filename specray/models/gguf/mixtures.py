"""Reads the configurations of mixtures of experts that are served from their GGUF files alone."""

from __future__ import annotations

from specray.models.gguf.keys import Keys
from specray.models.gguf.rope import read_rope
from specray.models.gguf.sizes import Config, read_sizes, rms_norm_eps, sizes_of

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SIGMOID, _SOFTMAX_OF_CHOSEN = 2, 3
"""Numbers of scores in GGUF; 0 stands for what the architecture has."""


def olmoe(keys: Keys) -> Config:
    """OLMoE."""
    sizes, (count, used) = read_sizes(keys), _counts(keys)
    keys.expect("expert_weights_norm", False)
    keys.expect("expert_feed_forward_length", sizes.mlp_size)
    return sizes_of(sizes) | {
        "model_type": "olmoe",
        **rms_norm_eps(keys),
        "rope_parameters": read_rope(keys, sizes.head_dim, sizes.context),
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": count,
        "num_experts_per_tok": used,
        "norm_topk_prob": False,
    }


def glm4moe(keys: Keys) -> Config:
    """GLM 4.5 and later; layers that predict several tokens are left aside."""
    sizes, (count, used) = read_sizes(keys), _counts(keys)
    keys.expect("expert_gating_func", 0, _SIGMOID)
    num_layers = sizes.num_layers - keys.whole("nextn_predict_layers", 0, least=0)
    aside = tuple(f"blk.{layer}." for layer in range(num_layers, sizes.num_layers))
    keys.apart |= {tensor.name for tensor in keys.header.tensors if tensor.name.startswith(aside)}
    return sizes_of(sizes) | {
        "model_type": "glm4_moe",
        **rms_norm_eps(keys),
        "num_hidden_layers": num_layers,
        "rope_parameters": read_rope(keys, sizes.head_dim, sizes.context, can_be_partial=True),
        "hidden_act": "silu",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_shared_experts": keys.whole("expert_shared_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", least=0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, above=0),
        "n_group": 1,
        "topk_group": 1,
    }


def gpt_oss(keys: Keys) -> Config:
    """gpt-oss, whose gates have the limits of the published models."""
    width, (count, used) = keys.whole("expert_feed_forward_length"), _counts(keys)
    keys.expect("feed_forward_length", width)
    keys.expect("expert_gating_func", 0, _SOFTMAX_OF_CHOSEN)
    sizes = read_sizes(keys, mlp_size=width)
    rope = read_rope(keys, sizes.head_dim, sizes.context)
    return sizes_of(sizes) | {
        "model_type": "gpt_oss",
        **rms_norm_eps(keys),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        "hidden_act": "silu",
        "attention_bias": True,
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": [_FULL if layer % 2 else _SLIDING for layer in range(sizes.num_layers)],
        "num_local_experts": count,
        "num_experts_per_tok": used,
    }


def _counts(keys: Keys) -> tuple[int, int]:
    """Experts of a layer, and those that compute a token."""
    used = keys.whole("expert_used_count")
    return keys.whole("expert_count", least=used), used
