"""Models with recurrent layers: of the gated delta rule, of Mamba 2, or short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specray.engine.model.layers.recurrent_config import (
    ConvolutionLayers,
    DeltaLayers,
    DeltaWeights,
    MambaLayers,
    Multipliers,
)

DELTA = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
"""Types with layers of the gated delta rule."""
_RECURRENT, _FULL = "linear_attention", "full_attention"
_OLMO_NORM_EPS = 1e-5
_MLP_KINDS = ("mlp", "moe")
_MAMBA_FIELDS = {
    "num_heads": "mamba_n_heads",
    "num_groups": "mamba_n_groups",
    "key_dim": "mamba_d_state",
    "value_dim": "mamba_d_head",
    "num_taps": "mamba_d_conv",
    "norm_eps": "rms_norm_eps",
    "has_conv_bias": "mamba_conv_bias",
    "has_input_bias": "mamba_proj_bias",
    "has_output_bias": "mamba_proj_bias",
}
"""Fields of ``MambaLayers``, and what configurations call them."""
_NEMOTRON_FIELDS = {
    "num_heads": "mamba_num_heads",
    "num_groups": "n_groups",
    "key_dim": "ssm_state_size",
    "value_dim": "mamba_head_dim",
    "num_taps": "conv_kernel",
    "norm_eps": "layer_norm_epsilon",
    "has_conv_bias": "use_conv_bias",
    "has_input_bias": "use_bias",
    "has_output_bias": "use_bias",
}


def can_lower_hybrid(config: Any) -> bool:
    """Whether the decoder has what a configuration of ``HYBRIDS`` says; others: yes."""
    checks = _CHECKS.get(config.model_type)
    return checks is None or checks(config)


def _can_lower_delta(config: Any) -> bool:
    """Whether some layers attend, and each key head of the others has as many value heads."""
    return _can_lower_kimi(config) and config.linear_num_value_heads % config.linear_num_key_heads == 0


def _can_lower_kimi(config: Any) -> bool:
    kinds = set(config.layer_types)
    return (
        _FULL in kinds
        and kinds <= {_FULL, _RECURRENT}
        and config.linear_conv_kernel_dim > 1
        and config.hidden_act == "silu"
    )


def _delta(config: Any) -> dict[str, Any]:
    layers = DeltaLayers(
        _are(config.layer_types, _RECURRENT),
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        DeltaWeights.JOINED if config.model_type == "qwen3_next" else DeltaWeights.BY_USE,
        config.rms_norm_eps,
    )
    return {
        "has_shifted_norms": True,
        "has_output_gate": True,
        "recurrent": layers if any(layers.layers) else None,
    }


def _olmo(config: Any) -> dict[str, Any]:
    layers = DeltaLayers(
        _are(config.layer_types, _RECURRENT),
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        DeltaWeights.APART,
        _OLMO_NORM_EPS,
        2.0 if config.linear_allow_neg_eigval else 1.0,
    )
    # Layers that attend norm what they add to the stream, the others what they read of it.
    return {"has_sandwich_norms": True, "has_input_norms": False, "recurrent": layers}


def _kimi(config: Any) -> dict[str, Any]:
    return {"recurrent": _kimi_layers(config, DeltaWeights.IN_STEPS)}


def _kimi_layers(config: Any, weights: DeltaWeights, least: float | None = None) -> DeltaLayers | None:
    layers = DeltaLayers(
        _are(config.layer_types, _RECURRENT),
        config.linear_num_heads,
        config.linear_num_heads,
        config.linear_head_dim,
        config.linear_head_dim,
        config.linear_conv_kernel_dim,
        weights,
        config.rms_norm_eps,
        least_log_decay=least,
    )
    return layers if any(layers.layers) else None


def _can_lower_ling(config: Any) -> bool:
    return _can_lower_kimi(config) and config.kda_lower_bound <= 0


def _ling(config: Any) -> dict[str, Any]:
    least = float(config.kda_lower_bound) if config.kda_safe_gate else None
    return {"has_head_gates": True, "recurrent": _kimi_layers(config, DeltaWeights.BY_NUMBER, least)}


def _are(kinds: list[str], *wanted: str) -> tuple[bool, ...]:
    return tuple(kind in wanted for kind in kinds)


def _can_lower_mamba(config: Any) -> bool:
    kinds = set(config.layer_types)
    return _FULL in kinds and kinds <= {_FULL, _RECURRENT} and _makes_sense(config, _MAMBA_FIELDS)


def _makes_sense(config: Any, fields: Mapping[str, str]) -> bool:
    num_heads, num_groups, num_taps = (
        getattr(config, fields[name]) for name in ("num_heads", "num_groups", "num_taps")
    )
    return bool(num_heads % num_groups == 0 and num_taps > 1)


def _mamba(config: Any, **others: Any) -> dict[str, Any]:
    return _mamba_of(config, _MAMBA_FIELDS, **{"steps": _steps(config.time_step_limit), **others})


def _mamba_of(config: Any, fields: Mapping[str, str], **others: Any) -> dict[str, Any]:
    """Layers of Mamba 2 whose values are fields of the configuration, and others."""
    values: dict[str, Any] = {own: getattr(config, field) for own, field in fields.items()}
    values["layers"] = _are(config.layer_types, _RECURRENT)
    values["field_names"] = fields["num_heads"], fields["num_groups"]
    layers = MambaLayers(**values | others)
    return {"recurrent": layers if any(layers.layers) else None}


def _steps(limits: Any) -> tuple[float, float]:
    least, most = (0.0, float("inf")) if limits is None else limits
    return float(least), float(most)


def _granite_hybrid(config: Any) -> dict[str, Any]:
    return _mamba(config) | {"has_joined_gates": not config.num_local_experts}


def _can_lower_falcon(config: Any) -> bool:
    """Biases would be multiplied by what their inputs are not."""
    has_factors = (config.attention_in_multiplier, config.ssm_in_multiplier) != (1.0, 1.0)
    has_biases = config.attention_bias or config.mamba_proj_bias
    return _makes_sense(config, _MAMBA_FIELDS) and not (has_factors and has_biases)


def _falcon(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    gate, values, keys, queries, steps = (each * config.ssm_in_multiplier for each in config.ssm_multipliers)
    entering = config.attention_in_multiplier
    mamba = _mamba(
        config,
        layers=(True,) * config.num_hidden_layers,
        norm_eps=config.rms_norm_eps if config.mamba_rms_norm else None,
        is_normed_first=bool(config.mamba_norm_before_gate),
        has_output_bias=bool(config.projectors_bias),
        multipliers=Multipliers(gate, values, keys, queries, steps),
        output_scale=float(config.ssm_out_multiplier),
    )
    return mamba | {
        "attending": (True,) * config.num_hidden_layers,
        "embedding_scale": float(config.embedding_multiplier),
        "logit_scale": float(config.lm_head_multiplier),
        "query_scale": float(head_dim**-0.5 * entering**2 * config.key_multiplier),
        "attention_scale": float(entering * config.attention_out_multiplier),
        "gate_scale": float(config.mlp_multipliers[0]),
        "down_scale": float(config.mlp_multipliers[1]),
    }


def _can_lower_nemotron(config: Any) -> bool:
    return (
        _FULL in config.layer_types
        and _makes_sense(config, _NEMOTRON_FIELDS)
        and config.mlp_hidden_act == "relu2"
        and config.moe_latent_size != 0
        and config.sliding_window is None
    )


def _nemotron(config: Any) -> dict[str, Any]:
    # What the library's chunks do, and its single steps do not.
    steps = float(config.time_step_min), float("inf")
    return _mamba_of(config, _NEMOTRON_FIELDS, steps=steps) | {
        "attending": _are(config.layer_types, _FULL),
        "with_mlps": _are(config.layer_types, *_MLP_KINDS),
        "has_gated_mlps": False,
    }


def _can_lower_convolution(config: Any) -> bool:
    kinds = set(config.layer_types)
    return config.conv_L_cache > 1 and "conv" in kinds and kinds - {"conv"} <= {_FULL, "sliding_attention"}


def _convolution(config: Any) -> dict[str, Any]:
    layers = ConvolutionLayers(
        _are(config.layer_types, "conv"), config.hidden_size, config.conv_L_cache, bool(config.conv_bias)
    )
    return {"recurrent": layers}


def _lfm3(config: Any) -> dict[str, Any]:
    return _convolution(config) | {
        "has_sandwich_norms": bool(config.use_sandwich_norm),
        "has_head_gates": bool(config.use_attention_gate),
    }


HYBRIDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(DELTA, _delta),
    "bailing_hybrid": _ling,
    "bamba": _mamba,
    "falcon_h1": _falcon,
    "granitemoehybrid": _granite_hybrid,
    "kimi_linear": _kimi,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _convolution),
    "lfm3": _lfm3,
    "nemotron_h": _nemotron,
    "olmo_hybrid": _olmo,
}
"""What types with recurrent layers have that Llama has not."""
_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(DELTA, _can_lower_delta),
    "bailing_hybrid": _can_lower_ling,
    "bamba": _can_lower_mamba,
    "falcon_h1": _can_lower_falcon,
    "granitemoehybrid": _can_lower_mamba,
    "kimi_linear": _can_lower_kimi,
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _can_lower_convolution),
    "nemotron_h": _can_lower_nemotron,
    "olmo_hybrid": _can_lower_delta,
}
