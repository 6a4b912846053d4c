"""Makes ``config.json`` of a GGUF header, family by family, as llama.cpp takes its keys.

What a file does not say is fixed here as llama.cpp fixes it, never left to a default of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from specray.gguf.header import GgufHeader
from specray.models.gguf.hybrids import lfm2, qwen35, qwen35moe
from specray.models.gguf.keys import Keys, UnfitError
from specray.models.gguf.mixtures import glm4moe, gpt_oss, olmoe
from specray.models.gguf.rope import read_rope
from specray.models.gguf.sizes import Config, layer_norm_eps, read_sizes, rms_norm_eps, sizes_of

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""Numbers of layers by which llama.cpp knows models whose queries are not scaled by the size of a head."""


def read_config(path: Path, header: GgufHeader) -> tuple[Config, frozenset[str]]:
    """What config.json says of the model, and the names of tensors that are no weights of it.

    Raises:
        UnfitError: the architecture is not read, a key is missing, of another type, out of its range, or
            says something that is not read.
    """
    read = _FAMILIES.get(header.architecture)
    if read is None:
        raise UnfitError(f"its architecture is not read; allowed: {', '.join(sorted(_FAMILIES))}")
    keys = Keys(path, header)
    config = read(keys)
    keys.check_all_read()
    return config, frozenset(keys.apart)


def _llama(keys: Keys) -> Config:
    sizes = read_sizes(keys)
    return sizes_of(sizes) | {
        "model_type": "llama",
        **rms_norm_eps(keys),
        "rope_parameters": read_rope(keys, sizes.head_dim, sizes.context, has_factors=True),
        "hidden_act": "silu",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
    }


def _qwen2(keys: Keys) -> Config:
    sizes = read_sizes(keys)
    return sizes_of(sizes) | {
        "model_type": "qwen2",
        **rms_norm_eps(keys),
        "rope_parameters": read_rope(keys, sizes.head_dim, sizes.context),
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(keys: Keys) -> Config:
    has_bias = keys.has_tensor("blk.0.attn_q.bias")
    return _qwen2(keys) | {"model_type": "qwen3", "attention_bias": has_bias}


def _experts(keys: Keys, config: Config, *, is_normed: bool) -> Config:
    """Numbers of experts. Their weights are made to add up to one, or not, in all models of a family."""
    used = keys.whole("expert_used_count")
    count = keys.whole("expert_count", least=used)
    keys.expect("expert_weights_norm", is_normed)
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.whole(
            "expert_feed_forward_length", max(1, config["intermediate_size"] // used)
        ),
        "norm_topk_prob": is_normed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(keys: Keys) -> Config:
    config = _qwen2(keys)
    shared = keys.whole("expert_shared_feed_forward_length", config["intermediate_size"])
    return (
        config
        | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared}
        | _experts(keys, config, is_normed=False)
    )


def _qwen3moe(keys: Keys) -> Config:
    config = _qwen3(keys)
    return config | {"model_type": "qwen3_moe"} | _experts(keys, config, is_normed=True)


def _phi3(keys: Keys) -> Config:
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.context, can_be_partial=True, has_factors=True)
    return sizes_of(sizes) | {
        "model_type": "phi3",
        **rms_norm_eps(keys),
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", sizes.context),
        "hidden_act": "silu",
        # llama.cpp attends to all tokens; the model was trained with the window.
        "sliding_window": keys.whole("attention.sliding_window", 0, least=0) or None,
    }


def _starcoder2(keys: Keys) -> Config:
    sizes = read_sizes(keys)
    return sizes_of(sizes) | {
        "model_type": "starcoder2",
        **layer_norm_eps(keys, "norm_epsilon"),
        "rope_parameters": read_rope(keys, sizes.head_dim, sizes.context),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def _gpt2(keys: Keys) -> Config:
    sizes = read_sizes(keys)
    for name, size in (("head_count_kv", sizes.num_heads), ("key_length", sizes.head_dim)):
        keys.expect(f"attention.{name}", size)
    return {
        "model_type": "gpt2",
        "vocab_size": sizes.vocab_size,
        "n_embd": sizes.hidden_size,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "n_positions": sizes.context,
        "n_inner": sizes.mlp_size,
        "tie_word_embeddings": sizes.is_tied,
        **sizes.token_ids,
        **layer_norm_eps(keys, "layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gemma(keys: Keys, *, period: int, layers_of_27b: int) -> Config:
    """What Gemma 2 and 3 have in common.

    Args:
        period: layers up to one that attends to all tokens, which it is, where the file does not say.
    """
    sizes = read_sizes(keys)
    is_second = period == 2
    window = keys.whole("attention.sliding_window", 4096 if is_second else 0, least=is_second) or None
    is_27b = sizes.num_layers == layers_of_27b
    cap = keys.number("final_logit_softcapping", 30.0 if is_second else 0.0, above=-1e-9)
    return sizes_of(sizes) | {
        **rms_norm_eps(keys),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": sizes.hidden_size // sizes.num_heads if is_27b else sizes.head_dim,
        "sliding_window": window,
        "layer_types": _kinds(keys, sizes.num_layers, period if window else 1),
        "final_logit_softcapping": cap or None,
        "use_bidirectional_attention": False,
    }


def _kinds(keys: Keys, num_layers: int, period: int) -> list[str]:
    """Kinds of the layers, of which each ``period``-th attends to all tokens."""
    name = "attention.sliding_window_pattern"
    flags = keys.flags_by_layer(name, num_layers)
    if flags is None:
        period = keys.whole(name, period)
        flags = tuple((layer + 1) % period != 0 for layer in range(num_layers))
    if period == 1 and any(flags):
        raise keys.unfit(name, flags, "no layers with a window, since attention.sliding_window is not set")
    return [_SLIDING if is_sliding else _FULL for is_sliding in flags]


def _gemma2(keys: Keys) -> Config:
    config = _gemma(keys, period=2, layers_of_27b=_GEMMA2_27B_LAYERS)
    rope = read_rope(keys, config["head_dim"], config["max_position_embeddings"])
    keys.expect("rope.freq_base_swa", rope["rope_theta"])
    cap = keys.number("attn_logit_softcapping", 50.0, above=-1e-9)
    return config | {
        "model_type": "gemma2",
        "rope_parameters": rope,
        "attn_logit_softcapping": cap or None,
    }


def _gemma3(keys: Keys) -> Config:
    config = _gemma(keys, period=6, layers_of_27b=_GEMMA3_27B_LAYERS)
    local = keys.number("rope.freq_base_swa", 10_000.0, above=0)
    return config | {
        "model_type": "gemma3_text",
        "rope_parameters": {
            _FULL: read_rope(keys, config["head_dim"], config["max_position_embeddings"]),
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        "attn_logit_softcapping": None,
        "attention_bias": False,
    }


_FAMILIES: Mapping[str, Callable[[Keys], Config]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4moe": glm4moe,
    "gpt-oss": gpt_oss,
    "gpt2": _gpt2,
    "lfm2": lfm2,
    "llama": _llama,
    "olmoe": olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen3moe": _qwen3moe,
    "starcoder2": _starcoder2,
}
