"""Reads ``config.json`` for the decoder without the library.

Read are the types that ``_OWN`` lists, with each type's own defaults, as transformers reads them. A file
with anything else in it is not guessed at: transformers reads it then (see ``from_library``), whose import
takes 4 s of processor time and 290 MB more in every process that checks a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specray.engine.model.decoder_config import DecoderConfig, RopeFormula
from specray.engine.model.families import gemma3
from specray.engine.model.families.fields import (
    ConfigFields,
    NotUnderstoodError,
    factor_formula,
    rope_formula,
)

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
_OWN: dict[str, dict[str, Any]] = {
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
    fields = ConfigFields(values, {**_SHARED, **_OWN[model_type]})
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.value("hidden_act") != "silu" or (model_type == "llama" and hidden_size % num_heads):
        raise NotUnderstoodError("hidden_act, hidden_size")
    is_given = model_type in ("mistral", "qwen3")
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
        has_qkv_bias=model_type == "qwen2" or has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias"),
        has_head_norm=model_type == "qwen3",
        windows=_windows(model_type, fields),
        rope=_rope(fields, head_dim, max_position_embeddings),
        draft_vocab_size=fields.size_or_none("draft_vocab_size"),
    )


def _windows(model_type: str, fields: ConfigFields) -> tuple[int | None, ...]:
    num_layers = fields.size("num_hidden_layers")
    if model_type == "llama":
        return (None,) * num_layers
    window = fields.window("sliding_window")
    if model_type == "mistral":
        return (window,) * num_layers
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
