"""Reads ``config.json`` for the decoder without the library.

Read are the types that ``_OWN`` lists, with each type's own defaults, as transformers reads them. A file
with anything else in it is not guessed at: transformers reads it then (see ``from_library``), whose import
takes 4 s of processor time and 290 MB more in every process that checks a model.

Types that are not listed are left to it for good: each would need the defaults, other names and ranges of its
class here again, and models of these types load for longer than that import takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from specray.engine.model.decoder_config import DecoderConfig, RopeFormula
from specray.engine.model.families import gemma3
from specray.engine.model.families.fields import (
    ConfigFields,
    NotUnderstoodError,
    factor_formula,
    is_whole,
    rope_formula,
)
from specray.engine.model.families.mixtures import can_route, experts_of
from specray.engine.model.layers.experts.config import Experts

DEFAULT_ROPE_THETA = 10_000.0
"""Base of the rotary wavelengths where a configuration names none."""


def read_decoder_config(values: Mapping[str, Any]) -> DecoderConfig | None:
    """The configuration that config.json holds; None: not every part of it is understood."""
    try:
        return gemma3.read(values) if values.get("model_type") == gemma3.MODEL_TYPE else _read(values)
    except NotUnderstoodError:
        return None


# Defaults of the types' own classes.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2_048,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "head_dim": None,
    "sliding_window": 4_096,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "head_dim": None,
    "use_sliding_window": False,
    "sliding_window": 4_096,
    "max_window_layers": 28,
    "layer_types": None,
}
_MIXTURE: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "head_dim": None,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_QWEN_MIXTURE: dict[str, Any] = {
    **_MIXTURE,
    "vocab_size": 151_936,
    "hidden_size": 2_048,
    "num_hidden_layers": 24,
    "use_sliding_window": False,
    "sliding_window": 4_096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **_MISTRAL,
        **_MIXTURE,
        "max_position_embeddings": 131_072,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_jitter_noise": 0.0,
    },
    "olmoe": {
        **_MIXTURE,
        "vocab_size": 50_304,
        "hidden_size": 2_048,
        "intermediate_size": 2_048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": None,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    "qwen2_moe": {
        **_QWEN_MIXTURE,
        "intermediate_size": 5_632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1_408,
        "shared_expert_intermediate_size": 5_632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
        "layer_types": None,
    },
    "qwen3_moe": {
        **_QWEN_MIXTURE,
        "intermediate_size": 6_144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "attention_bias": False,
    },
}
_OWN: dict[str, dict[str, Any]] = {
    **_MIXTURES,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128, "attention_bias": False},
}
_SHARED: dict[str, Any] = {
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "draft_vocab_size": None,
    "rope_theta": DEFAULT_ROPE_THETA,
    "rope_scaling": None,
    "rope_parameters": None,
}


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _OWN:
        raise NotUnderstoodError("model_type")
    if model_type == "qwen3_moe" and "num_local_experts" in values:
        # The library writes this name and takes both.
        if "num_experts" in values:
            raise NotUnderstoodError("num_experts")
        values = {"num_experts" if name == "num_local_experts" else name: values[name] for name in values}
    fields = ConfigFields(values, {**_SHARED, **_OWN[model_type]})
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.value("hidden_act") != "silu" or (model_type == "llama" and hidden_size % num_heads):
        raise NotUnderstoodError("hidden_act, hidden_size")
    if fields.value("clip_qkv") is not None:
        raise NotUnderstoodError("clip_qkv")
    is_given = model_type in ("mistral", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
    num_kv_heads = (
        fields.size("num_key_value_heads") if is_given else fields.size_or_none("num_key_value_heads")
    )
    is_given = model_type == "qwen3" or (model_type == "qwen2" and "head_dim" in values)
    head_dim = fields.size("head_dim") if is_given else fields.size_or_none("head_dim")
    head_dim = head_dim or hidden_size // num_heads
    num_kv_heads = num_kv_heads or num_heads
    eps = fields.value("rms_norm_eps")
    if head_dim < 2 or head_dim % 2 or num_heads % num_kv_heads or type(eps) is not float:
        raise NotUnderstoodError("head_dim, num_key_value_heads, rms_norm_eps")
    max_position_embeddings = fields.size("max_position_embeddings")
    has_bias = fields.flag("attention_bias")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        has_qkv_bias=model_type == "qwen2" or has_bias or fields.flag("qkv_bias"),
        has_output_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias"),
        has_head_norm=model_type in ("qwen3", "qwen3_moe"),
        has_whole_norm=model_type == "olmoe",
        windows=_windows(model_type, fields),
        rope=_rope(fields, head_dim, max_position_embeddings),
        draft_vocab_size=fields.size_or_none("draft_vocab_size"),
        experts=_experts(fields, _MIXTURES[model_type]) if model_type in _MIXTURES else None,
    )


def _experts(fields: ConfigFields, defaults: Mapping[str, Any]) -> Experts | None:
    """A mixture's experts, from fields that are each of the kind of its default."""
    for name in defaults:
        if name.endswith(("_experts", "_step", "_per_tok")) or name == "shared_expert_intermediate_size":
            fields.size(name)
        elif name in ("norm_topk_prob", "output_router_logits"):
            fields.flag(name)
        elif name.startswith("router_") and type(fields.value(name)) is not float:
            raise NotUnderstoodError(name)
    dense = fields.value("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(map(is_whole, dense))):
        raise NotUnderstoodError("mlp_only_layers")
    if "moe_intermediate_size" in defaults:
        fields.size("moe_intermediate_size")
    experts = experts_of(SimpleNamespace(**fields.values))
    if experts is not None and not can_route(experts):
        raise NotUnderstoodError("num_experts_per_tok")
    return experts


def _windows(model_type: str, fields: ConfigFields) -> tuple[int | None, ...]:
    num_layers = fields.size("num_hidden_layers")
    if model_type in ("llama", "olmoe"):
        return (None,) * num_layers
    if model_type in ("qwen2_moe", "qwen3_moe") and not fields.flag("use_sliding_window"):
        kinds = fields.value("layer_types")
        if kinds is not None and kinds != ["full_attention"] * num_layers:
            raise NotUnderstoodError("layer_types")
        return (None,) * num_layers
    window = fields.window("sliding_window")
    if model_type in ("mistral", "mixtral", "qwen3_moe"):
        return (window,) * num_layers
    if model_type == "qwen2_moe":
        raise NotUnderstoodError("use_sliding_window")
    if not fields.flag("use_sliding_window"):
        window = None
    first = fields.value("max_window_layers")
    if type(first) is not int:
        raise NotUnderstoodError("max_window_layers")
    kinds = fields.value("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise NotUnderstoodError("layer_types")
    if not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise NotUnderstoodError("layer_types")
    if window is None and "sliding_attention" in kinds:
        raise NotUnderstoodError("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: ConfigFields, head_dim: int, max_position_embeddings: int) -> RopeFormula:
    """``rope_scaling`` of older files counts before ``rope_parameters``; both may name their own theta."""
    older, newer = fields.value("rope_scaling"), fields.value("rope_parameters")
    if not all(given is None or isinstance(given, Mapping) for given in (older, newer)):
        raise NotUnderstoodError("rope_scaling, rope_parameters")
    values = {"rope_theta": fields.value("rope_theta"), **(older or newer or {})}
    if values.get("rope_type") == "longrope":
        return factor_formula(values, head_dim)
    return rope_formula(values, max_position_embeddings)
