"""Reads ``config.json`` of Gemma 3's text models without the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specray.engine.activation import Activation
from specray.engine.model.decoder_config import DecoderConfig, RopeFormula
from specray.engine.model.families.fields import ConfigFields, NotUnderstoodError, is_whole, rope_formula

MODEL_TYPE = "gemma3_text"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6
"""Layers up to one with full attention, which it is, where a configuration names neither."""
_THETAS = {_FULL: ("rope_theta", 1_000_000.0), _SLIDING: ("rope_local_base_freq", 10_000.0)}
"""Where older files have the base of the wavelengths, and what it is without."""

# Defaults of the type's own class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": None,
    "rope_local_base_freq": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4_096,
    "sliding_window_pattern": _PATTERN,
    # The library writes it, and reads the layers' kinds instead.
    "_sliding_window_pattern": _PATTERN,
    "layer_types": None,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "draft_vocab_size": None,
}


def read(values: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that config.json holds.

    Raises:
        NotUnderstoodError: not every part of it is understood.
    """
    fields = ConfigFields(values, _DEFAULTS)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads, head_dim = fields.size("num_key_value_heads"), fields.size("head_dim")
    eps, has_bias = fields.value("rms_norm_eps"), fields.flag("attention_bias")
    if hidden_size % num_heads or num_heads % num_kv_heads or head_dim % 2 or type(eps) is not float:
        raise NotUnderstoodError("hidden_size, num_key_value_heads, head_dim, rms_norm_eps")
    if fields.value("hidden_activation") != "gelu_pytorch_tanh" or fields.value(
        "use_bidirectional_attention"
    ):
        raise NotUnderstoodError("hidden_activation, use_bidirectional_attention")
    if any(fields.value(name) is not None for name in ("final_logit_softcapping", "attn_logit_softcapping")):
        raise NotUnderstoodError("final_logit_softcapping, attn_logit_softcapping")
    if not is_whole(fields.value("_sliding_window_pattern")):
        raise NotUnderstoodError("_sliding_window_pattern")
    longest, kinds = fields.size("max_position_embeddings"), _layer_types(fields)
    sliding, window = _rope(fields, _SLIDING, longest), fields.window("sliding_window")
    if window is None and _SLIDING in kinds:
        raise NotUnderstoodError("sliding_window")
    return DecoderConfig(
        model_type=MODEL_TYPE,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=len(kinds),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        max_position_embeddings=longest,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=False,
        has_head_norm=True,
        windows=tuple(window if kind == _SLIDING else None for kind in kinds),
        rope=_rope(fields, _FULL, longest),
        draft_vocab_size=fields.size_or_none("draft_vocab_size"),
        own_ropes=tuple((layer, sliding) for layer, kind in enumerate(kinds) if kind == _SLIDING),
        activation=Activation.GELU_TANH,
        has_shifted_norms=True,
        has_sandwich_norms=True,
        embedding_scale=hidden_size**0.5,
        has_scaled_embedding=True,
        query_scale=fields.size("query_pre_attn_scalar") ** -0.5,
    )


def _layer_types(fields: ConfigFields) -> list[str]:
    num_layers, kinds = fields.size("num_hidden_layers"), fields.value("layer_types")
    if kinds is None:
        pattern = fields.size("sliding_window_pattern")
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise NotUnderstoodError("layer_types")
    if not all(kind in (_FULL, _SLIDING) for kind in kinds):
        raise NotUnderstoodError("layer_types")
    return kinds


def _rope(fields: ConfigFields, kind: str, max_position_embeddings: int) -> RopeFormula:
    """The rotary embeddings of one kind of layers. Scaling in older files is for full attention alone."""
    older, newer = fields.value("rope_scaling"), fields.value("rope_parameters")
    name, theta = _THETAS[kind]
    if fields.value(name) is not None:
        theta = fields.value(name)
    given: Any = {}
    if newer is not None:
        if older is not None or not isinstance(newer, Mapping) or set(newer) != {_FULL, _SLIDING}:
            raise NotUnderstoodError("rope_parameters")
        given = newer[kind]
    elif older is not None and kind == _FULL:
        given = older
    if not isinstance(given, Mapping) or (given and "rope_type" not in given):
        raise NotUnderstoodError("rope_scaling, rope_parameters")
    return rope_formula({"rope_theta": theta, **given}, max_position_embeddings)
