"""Makes ``config.json`` of the GGUF families that have recurrent layers besides attention."""

from __future__ import annotations

from typing import Any

from specray.models.gguf.keys import Keys
from specray.models.gguf.rope import read_rope
from specray.models.gguf.sizes import Config, read_sizes, rms_norm_eps, sizes_of

_FULL = "full_attention"


def lfm2(keys: Keys) -> Config:
    """LFM2: a layer without key-value heads is a short convolution."""
    by_layer = keys.whole_by_layer("attention.head_count_kv", keys.whole("block_count"))
    if len(set(by_layer) - {0}) != 1:
        raise keys.unfit("attention.head_count_kv", by_layer, "one number of heads, or 0, for each layer")
    sizes = read_sizes(keys, num_kv_heads=max(by_layer))
    return sizes_of(sizes) | {
        "model_type": "lfm2",
        **rms_norm_eps(keys, "norm_eps"),
        "rope_parameters": read_rope(keys, sizes.head_dim, sizes.context),
        "layer_types": [_FULL if heads else "conv" for heads in by_layer],
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "conv_bias": any(tensor.name.endswith("shortconv.in_proj.bias") for tensor in keys.header.tensors),
        # The file has the final width.
        "block_auto_adjust_ff_dim": False,
    }


def qwen35(keys: Keys) -> Config:
    """Qwen 3.5: gated delta rule, and attention with rotary embeddings in a part of each head."""
    return _qwen35(keys, None) | {"model_type": "qwen3_5_text"}


def qwen35moe(keys: Keys) -> Config:
    """Qwen 3.5 with experts and a shared expert."""
    used = keys.whole("expert_used_count")
    width = keys.whole("expert_feed_forward_length")
    # llama.cpp's converter writes the width of an MLP that no layer has, or none.
    keys.whole("feed_forward_length", width)
    keys.expect("expert_weights_norm", True)
    return _qwen35(keys, width) | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": keys.whole("expert_count", least=used),
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }


def _qwen35(keys: Keys, mlp_size: int | None) -> Config:
    sizes = read_sizes(keys, mlp_size=mlp_size)
    rope: dict[str, Any] = read_rope(keys, sizes.head_dim, sizes.context, can_be_partial=True)
    sections = keys.whole_by_layer("rope.dimension_sections", 4)
    value_heads = keys.whole("ssm.time_step_rank")
    inner = keys.whole("ssm.inner_size")
    if inner % value_heads:
        raise keys.unfit("ssm.inner_size", inner, f"a multiple of {value_heads}, its value heads")
    # Layers that predict several tokens come last and are left aside.
    num_layers = sizes.num_layers - keys.whole("nextn_predict_layers", 0, least=0)
    aside = tuple(f"blk.{layer}." for layer in range(num_layers, sizes.num_layers))
    keys.apart |= {tensor.name for tensor in keys.header.tensors if tensor.name.startswith(aside)}
    return sizes_of(sizes) | {
        **rms_norm_eps(keys),
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "layer_types": _qwen35_kinds(keys, sizes.num_layers)[:num_layers],
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "rope_parameters": {
            **rope,
            "mrope_section": [section for section in sections if section],
            "mrope_interleaved": True,
        },
    }


def _qwen35_kinds(keys: Keys, num_layers: int) -> list[str]:
    interval = keys.whole("full_attention_interval", 4)
    flags = keys.flags_by_layer("attention.recurrent_layers", num_layers)
    if flags is None:
        flags = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return ["linear_attention" if is_recurrent else _FULL for is_recurrent in flags]
