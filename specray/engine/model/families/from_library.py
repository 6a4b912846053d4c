"""The decoder's configuration from one that transformers has read.

Importing this imports transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specray.engine.activation import Activation
from specray.engine.model.decoder_config import (
    MODEL_TYPES,
    Clamp,
    DecoderConfig,
    ExpertNames,
    Experts,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeFormula,
    RopeTable,
    StackedNames,
)

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_WITH_ATTENTION_BIAS = frozenset(
    {"llama", "qwen3", "qwen3_moe", "gemma3_text", "smollm3", "granite", "gpt_oss"}
)
"""Types in which ``attention_bias`` means something."""
_WITH_MLP_BIAS = frozenset({"llama", "smollm3", "granite"})
_WITH_HEAD_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
_PARTLY_ROTATED = frozenset({"phi3"})
"""Types that may rotate a part of each head."""
_QWEN_NAMES = ExpertNames("mlp.", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ExpertNames("block_sparse_moe.", "w1", "w3", "w2")
_GPT_OSS_NAMES = StackedNames("mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def can_lower(config: Any) -> bool:
    """Whether the decoder computes what a text configuration describes."""
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
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return False
    if config.model_type == "gemma3_text":
        has_caps = config.attn_logit_softcapping is not None or config.final_logit_softcapping is not None
        has_scale = bool(config.query_pre_attn_scalar > 0)
        return not has_caps and not config.use_bidirectional_attention and has_scale
    if config.model_type == "granite":
        return bool(config.residual_multiplier > 0 and config.logits_scaling != 0)
    if config.model_type == "qwen3_moe" and config.decoder_sparse_step < 1:
        return False
    if config.model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
        return bool(1 <= config.num_experts_per_tok <= config.num_experts)
    return True


def decoder_config_of(config: Any, *, max_model_len: int) -> DecoderConfig:
    """The decoder's configuration, from one that it covers. Raises ValueError for senseless values."""
    model_type, num_heads = config.model_type, config.num_attention_heads
    has_bias = model_type in _WITH_ATTENTION_BIAS and bool(config.attention_bias)
    head_dim = _head_dim(config)
    if num_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}; allowed: a multiple of num_key_value_heads, which is "
            f"{config.num_key_value_heads}"
        )
    rope, own_ropes = _ropes(config, max_model_len)
    switches = _SWITCHES[model_type](config) if model_type in _SWITCHES else {}
    rotary_dim = int(head_dim * _rotary_share(config))
    return DecoderConfig(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        has_qkv_bias=model_type == "qwen2" or has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=model_type in _WITH_MLP_BIAS and bool(config.mlp_bias),
        has_head_norm=model_type in _WITH_HEAD_NORM,
        windows=_windows(config),
        rope=rope,
        draft_vocab_size=_draft_vocab_size(config),
        own_ropes=own_ropes,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        activation=_ACTIVATIONS[_activation(config)],
        **switches,
    )


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


def _phi3(config: Any) -> dict[str, Any]:
    return {"has_joined_weights": True}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    layers = tuple(
        layer not in config.mlp_only_layers
        and config.num_experts > 0
        and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
    experts = Experts(
        num_experts=config.num_experts,
        num_chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        is_normed=bool(config.norm_topk_prob),
        layers=layers,
        names=_QWEN_NAMES,
    )
    return {"experts": experts if any(layers) else None}


def _mixtral(config: Any) -> dict[str, Any]:
    experts = Experts(
        num_experts=config.num_local_experts,
        num_chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        is_normed=True,
        layers=(True,) * config.num_hidden_layers,
        names=_MIXTRAL_NAMES,
    )
    return {"experts": experts}


def _gpt_oss(config: Any) -> dict[str, Any]:
    experts = Experts(
        num_experts=config.num_local_experts,
        num_chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        # A softmax over the chosen ones is one over all of them, normed.
        is_normed=True,
        layers=(True,) * config.num_hidden_layers,
        names=_GPT_OSS_NAMES,
        clamp=Clamp(float(config.swiglu_alpha), float(config.swiglu_limit)),
    )
    return {"experts": experts, "has_sinks": True}


_SWITCHES = {
    "gemma3_text": _gemma3,
    "granite": _granite,
    "phi3": _phi3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
}
"""What types have that Llama has not."""


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _activation(config: Any) -> str:
    name: str = config.hidden_activation if config.model_type == "gemma3_text" else config.hidden_act
    return name


def _rotary_share(config: Any) -> float:
    """Share of each head that is rotated; of layers of several kinds, the first that is not all of it."""
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
    if config.model_type in ("llama", "granite"):
        return (None,) * num_layers
    window: int | None = config.sliding_window
    if config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return (window,) * num_layers
    if config.model_type == "smollm3" and not config.use_sliding_window:
        window = None
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _ropes(config: Any, max_model_len: int) -> tuple[Rope, tuple[tuple[int, Rope | None], ...]]:
    if config.model_type == "gemma3_text":
        # A model need not have layers of both kinds.
        full, sliding = (
            _rope(config, max_model_len, kind) for kind in ("full_attention", "sliding_attention")
        )
        kinds = enumerate(config.layer_types)
        return full, tuple((layer, sliding) for layer, kind in kinds if kind == "sliding_attention")
    rope = _rope(config, max_model_len)
    if config.model_type == "smollm3":
        # The list may be longer than the model.
        flags = enumerate(config.no_rope_layers[: config.num_hidden_layers])
        return rope, tuple((layer, None) for layer, has_rope in flags if not has_rope)
    return rope, ()


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
