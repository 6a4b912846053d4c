"""The decoder's configuration from one that transformers has read.

Importing this imports transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specray.engine.activation import Activation
from specray.engine.model.decoder_config import (
    MODEL_TYPES,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeFormula,
    RopeTable,
)
from specray.engine.model.families.config_json import DEFAULT_ROPE_THETA
from specray.engine.model.families.hybrids import DELTA, HYBRIDS, can_lower_hybrid
from specray.engine.model.families.latent import LATENT, can_be_latent, latent_switches
from specray.engine.model.families.mixtures import can_route, experts_of

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_OWN_ACTIVATIONS = {
    "gemma3_text": "hidden_activation",
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3")),
    "nemotron_h": "mamba_hidden_act",
}
"""Fields of activations that are not ``hidden_act``; None: it is SiLU. Nemotron-H's MLPs have another."""
_OWN_NORM_EPS = {**dict.fromkeys(("lfm2", "lfm2_moe"), "norm_eps"), "nemotron_h": "layer_norm_epsilon"}
"""Fields of what is added under the root of norms that are not ``rms_norm_eps``."""
_GRANITE_MIXTURES = frozenset({"granitemoe", "granitemoe_swa", "granitemoeshared"})
_WITH_ATTENTION_BIAS = (
    _GRANITE_MIXTURES
    | DELTA
    | {
        "llama",
        "qwen3",
        "qwen3_moe",
        "gemma3_text",
        "smollm3",
        "granite",
        "gpt_oss",
        "aria_text",
        "bamba",
        "dots1",
        "falcon_h1",
        "flex_olmo",
        "flint",
        "granitemoehybrid",
        "hy_v3",
        "lfm3",
        "mellum",
        "olmo_hybrid",
        "olmoe",
    }
)
"""Types in which ``attention_bias`` means all projections."""
_QKV_BIAS = {"glm4_moe": "attention_bias", "solar_open": "attention_bias", "qwen2_moe": "qkv_bias"}
"""Fields that mean the projections before attention alone."""
_WITH_MLP_BIAS = frozenset(
    {
        "llama",
        "smollm3",
        "granite",
        "aria_text",
        "bamba",
        "deepseek_v2",
        "falcon_h1",
        "hy_v3",
        "minicpm3",
        "nemotron_h",
    }
)
_WITH_HEAD_NORM = DELTA | frozenset(
    {
        "qwen3",
        "qwen3_moe",
        "gemma3_text",
        "dots1",
        "exaone_moe",
        "flint",
        "hy_v3",
        "kolibri1",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mellum",
    }
)
_WITH_WHOLE_NORM = frozenset({"flex_olmo", "minimax_m2", "olmo_hybrid", "olmoe"})
_PARTLY_ROTATED = DELTA | {"phi3", "glm4_moe", "minimax_m2", "bamba"}
"""Types that may rotate a part of each head."""
_ROTATED_IN_WINDOWS = frozenset({"exaone_moe", "flint", "kolibri1"})
"""Types whose layers without a window have no rotary embeddings."""
_TEXT_PARTS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text parts of multimodal models that compute what another type does: a text's positions are the same on all
of their axes."""
_ROPE_BY_KIND = frozenset({"gemma3_text", "lfm3", "mellum"})
_WITHOUT_WINDOWS = (
    (_GRANITE_MIXTURES - {"granitemoe_swa"})
    | (set(HYBRIDS) - {"lfm3"})
    | LATENT
    | {
        "llama",
        "granite",
        "aria_text",
        "ernie4_5_moe",
        "flex_olmo",
        "glm4_moe",
        "hy_v3",
        "minimax_m2",
        "olmoe",
        "solar_open",
    }
)


def can_lower(config: Any) -> bool:
    """Whether the decoder computes what a text configuration describes."""
    config = _as_own_type(config)
    if (
        config.is_heterogeneous
        or config.model_type not in MODEL_TYPES
        or _activation(config) not in _ACTIVATIONS
    ):
        return False
    if _rotary_share(config) != 1.0 and (
        config.model_type not in _PARTLY_ROTATED or int(_head_dim(config) * _rotary_share(config)) % 2
    ):
        return False
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type in HYBRIDS:
        if not can_lower_hybrid(config):
            return False
    elif kinds - {"full_attention", "sliding_attention"}:
        return False
    if config.model_type in LATENT and not can_be_latent(config):
        return False
    if "sliding_attention" in kinds and config.sliding_window == 0:
        return False
    if config.model_type == "gemma3_text":
        has_caps = config.attn_logit_softcapping is not None or config.final_logit_softcapping is not None
        has_scale = bool(config.query_pre_attn_scalar > 0)
        return not has_caps and not config.use_bidirectional_attention and has_scale
    if hasattr(config, "residual_multiplier") and not (
        config.residual_multiplier > 0 and config.logits_scaling != 0
    ):
        return False
    if getattr(config, "clip_qkv", None) is not None or getattr(config, "use_bias", False):
        # ERNIE's is that of the head, too.
        return False
    if getattr(config, "decoder_sparse_step", 1) < 1:
        return False
    experts = experts_of(config)
    return experts is None or can_route(experts)


def decoder_config_of(config: Any, *, max_model_len: int) -> DecoderConfig:
    """The decoder's configuration, from one that it covers. Raises ValueError for senseless values."""
    config = _as_own_type(config)
    model_type, num_heads = config.model_type, config.num_attention_heads
    has_bias = model_type in _WITH_ATTENTION_BIAS and bool(config.attention_bias)
    head_dim = _head_dim(config)
    if num_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}; allowed: a multiple of num_key_value_heads, which is "
            f"{config.num_key_value_heads}"
        )
    rope, own_ropes = _ropes(config, max_model_len)
    switches = {} if model_type not in _SWITCHES else _SWITCHES[model_type](config)
    switches |= {} if model_type not in HYBRIDS else HYBRIDS[model_type](config)
    rotary_dim = int(head_dim * _rotary_share(config))
    made = DecoderConfig(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_mlp_size(config),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=_norm_eps(config),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        has_qkv_bias=has_bias or _has_qkv_bias(config),
        has_output_bias=has_bias,
        has_mlp_bias=model_type in _WITH_MLP_BIAS and bool(config.mlp_bias),
        has_head_norm=model_type in _WITH_HEAD_NORM or bool(getattr(config, "use_qk_norm", False)),
        has_whole_norm=model_type in _WITH_WHOLE_NORM,
        windows=_windows(config),
        rope=rope,
        draft_vocab_size=_draft_vocab_size(config),
        own_ropes=own_ropes,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        activation=_ACTIVATIONS[_activation(config)],
        experts=experts_of(config),
    )
    return replace(made, **switches)


def _as_own_type(config: Any) -> Any:
    """The configuration, as one of the type that computes the same."""
    own = _TEXT_PARTS.get(config.model_type)
    if own is None:
        return config
    changed = copy(config)
    changed.model_type = own
    return changed


def _gemma3(config: Any) -> dict[str, Any]:
    return {
        "has_shifted_norms": True,
        "has_sandwich_norms": True,
        "embedding_scale": config.hidden_size**0.5,
        "has_scaled_embedding": True,
        "query_scale": config.query_pre_attn_scalar**-0.5,
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "embedding_scale": float(config.embedding_multiplier),
        "query_scale": float(config.attention_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": 1.0 / config.logits_scaling,
    }


_SWITCHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(LATENT, latent_switches),
    "gemma3_text": _gemma3,
    "granite": _granite,
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _granite),
    "granitemoe_swa": lambda config: {**_granite(config), "has_sinks": True},
    "phi3": lambda config: {"has_joined_queries": True, "has_joined_gates": True},
    "ernie4_5_moe": lambda config: {"has_neighbour_pairs": True},
    "flex_olmo": lambda config: {"has_sandwich_norms": True, "has_input_norms": False},
    "kolibri1": lambda config: {"has_sandwich_norms": True},
    **dict.fromkeys(("flint", "gpt_oss"), lambda config: {"has_sinks": True}),
}
"""What types have that Llama has not, but for recurrent layers."""


def _has_qkv_bias(config: Any) -> bool:
    field = _QKV_BIAS.get(config.model_type)
    return config.model_type == "qwen2" or (field is not None and bool(getattr(config, field)))


def _mlp_size(config: Any) -> int:
    """Width of the layers with one MLP; of a type without such, that of its experts."""
    if config.model_type == "granitemoehybrid" and not config.num_local_experts:
        return int(config.shared_intermediate_size)
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        share, factor = int(2 * config.intermediate_size / 3), config.block_ffn_dim_multiplier
        unit = config.block_multiple_of
        return share if factor is None else -(-int(factor * share) // unit) * unit
    size: int = getattr(config, "intermediate_size", None) or config.moe_intermediate_size
    return size


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _activation(config: Any) -> str:
    field = _OWN_ACTIVATIONS.get(config.model_type, "hidden_act")
    return "silu" if field is None else str(getattr(config, field))


def _norm_eps(config: Any) -> float:
    return float(getattr(config, _OWN_NORM_EPS.get(config.model_type, "rms_norm_eps")))


def _rotary_share(config: Any) -> float:
    """Share of each head that is rotated; of layers of several kinds, the first that is not all of it."""
    if config.model_type == "lfm3":
        # Frequencies of what is not rotated are zero.
        return 1.0
    values = getattr(config, "rope_parameters", None) or {}
    nested = (each for each in values.values() if isinstance(each, Mapping))
    named = [each.get("partial_rotary_factor") for each in (values, *nested)]
    shares = list(filter(None, named)) or [getattr(config, "partial_rotary_factor", None) or 1.0]
    return float(next((share for share in shares if share != 1.0), 1.0))


def _draft_vocab_size(config: Any) -> int | None:
    size = getattr(config, "draft_vocab_size", None)
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"draft_vocab_size is {size!r}; allowed: 1 or more")
    return size


def _windows(config: Any) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type in _WITHOUT_WINDOWS or not hasattr(config, "sliding_window"):
        return (None,) * num_layers
    if config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return (window,) * num_layers
    if config.model_type == "smollm3" and not config.use_sliding_window:
        window = None
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _ropes(config: Any, max_model_len: int) -> tuple[Rope, tuple[tuple[int, Rope | None], ...]]:
    if config.model_type in _ROPE_BY_KIND:
        # A model need not have layers of both kinds.
        named = (kind for kind, values in config.rope_parameters.items() if values)
        ropes = {kind: _rope(config, max_model_len, kind) for kind in named}
        full, sliding = (ropes.get(kind) for kind in ("full_attention", "sliding_attention"))
        kinds = [layer for layer, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
        return next(rope for rope in (full, sliding) if rope), tuple((layer, sliding) for layer in kinds)
    if config.model_type == "granitemoe_swa":
        bases = config.layer_rope_theta[: config.num_hidden_layers]
        own = [_rope(_with_theta(config, theta), max_model_len) if theta else None for theta in bases]
        return _rope(config, max_model_len), tuple(enumerate(own))
    if not _is_rotated(config):
        layers = range(config.num_hidden_layers)
        return RopeFormula(DEFAULT_ROPE_THETA), tuple((layer, None) for layer in layers)
    rope = _rope(config, max_model_len)
    if config.model_type == "smollm3":
        # The list may be longer than the model.
        flags = enumerate(config.no_rope_layers[: config.num_hidden_layers])
        return rope, tuple((layer, None) for layer, has_rope in flags if not has_rope)
    if config.model_type in _ROTATED_IN_WINDOWS and config.sliding_window is not None:
        return rope, tuple((layer, None) for layer, window in enumerate(_windows(config)) if window is None)
    return rope, ()


def _is_rotated(config: Any) -> bool:
    if config.model_type == "granitemoehybrid":
        return bool(config.position_embedding_type == "rope")
    if config.model_type == "kimi_linear":
        # Whatever its files say of a theta.
        return False
    values = getattr(config, "rope_parameters", None)
    return values is not None and values.get("rope_theta") is not None


def _with_theta(config: Any, theta: float) -> Any:
    changed = copy(config)
    changed.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    return changed


def _rope(config: Any, max_model_len: int, layer_type: str | None = None) -> Rope:
    values: Mapping[str, Any] = config.rope_parameters
    if layer_type is not None:
        values = values[layer_type]
    kind = values["rope_type"]
    if kind == "default":
        return RopeFormula(float(values["rope_theta"]))
    if kind == "linear":
        return RopeFormula(float(values["rope_theta"]), LinearScaling(float(values["factor"])))
    if kind == "llama3":
        scaling = Llama3Scaling(
            float(values["factor"]),
            float(values["low_freq_factor"]),
            float(values["high_freq_factor"]),
            values["original_max_position_embeddings"],
        )
        return RopeFormula(float(values["rope_theta"]), scaling)
    named = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), seq_len=max_model_len, **named
    )
    return RopeTable(tuple(frequencies.float().tolist()), float(factor))
