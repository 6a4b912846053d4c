"""The experts of each family, from a configuration that transformers has read.

Scores, choices and weights are those of each type's router in transformers, in its order of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specray.engine.activation import Clamp
from specray.engine.model.layers.experts.config import (
    Experts,
    Groups,
    Routing,
    Score,
    SharedMlp,
    Stacked,
)

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts."""
_NUM_SUMMED = 2
"""Best experts of a group that decide which groups are left (DeepSeek-V3, 2024)."""
_EPSILON = 1e-20
"""What DeepSeek-V3 and its kin add to a sum of weights."""
_LFM_EPSILON = 1e-6


def experts_of(config: Any) -> Experts | None:
    """The experts of a configuration; None: it has none in any layer."""
    read = _READERS.get(config.model_type)
    experts = None if read is None else read(config)
    return experts if experts is not None and any(experts.layers) else None


def can_route(experts: Experts) -> bool:
    """Whether the numbers make sense together."""
    routing, count = experts.routing, experts.num_experts
    if count < 1 or not 1 <= (routing.num_chosen or 0) <= experts.num_routed:
        return False
    groups = routing.groups
    if groups is None:
        return True
    if groups.number < 1 or count % groups.number or not 1 <= groups.num_kept <= groups.number:
        return False
    size = count // groups.number
    return size >= groups.num_summed and routing.num_chosen <= groups.num_kept * size


def _experts(config: Any, routing: Routing, **others: Any) -> Experts:
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    layers = (True,) * config.num_hidden_layers
    return Experts(
        _count(config), **{"intermediate_size": width, "layers": layers, "routing": routing, **others}
    )


def _count(config: Any) -> int:
    """Experts of a layer; 0: the configuration does not say."""
    return int(next(filter(None, (getattr(config, name, None) for name in _COUNTS)), 0))


def _sparse(config: Any) -> tuple[bool, ...]:
    return tuple(kind == "sparse" for kind in config.mlp_layer_types)


def _at_steps(config: Any) -> tuple[bool, ...]:
    """Every so many layers, but for some."""
    return tuple(
        layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )


def _after_dense(config: Any) -> tuple[bool, ...]:
    return tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))


def _shared(config: Any, number: int | None) -> SharedMlp | None:
    """Shared experts, so many, as one MLP."""
    return SharedMlp(number * config.moe_intermediate_size) if number else None


def _softmax(config: Any) -> Routing:
    """Routing of Qwen's and AllenAI's mixtures."""
    is_normed = bool(getattr(config, "norm_topk_prob", True))
    return Routing(config.num_experts_per_tok, is_normed=is_normed, is_rounded=True)


def _grouped(config: Any) -> Routing:
    """Routing of DeepSeek-V3."""
    groups = None
    if config.n_group not in (None, 1):
        groups = Groups(config.n_group, config.topk_group, _NUM_SUMMED)
    return Routing(
        config.num_experts_per_tok,
        is_wide=True,
        score=Score.SIGMOID,
        choice_bias=(_count(config),),
        groups=groups,
        is_normed=bool(config.norm_topk_prob),
        epsilon=_EPSILON,
        scale=float(config.routed_scaling_factor),
    )


def _qwen2_moe(config: Any) -> Experts:
    shared = SharedMlp(config.shared_expert_intermediate_size, has_gate=True)
    return _experts(config, _softmax(config), layers=_at_steps(config), shared=shared)


def _qwen3_5_moe(config: Any) -> Experts:
    routing = Routing(config.num_experts_per_tok, is_normed=True, is_rounded=True)
    shared = SharedMlp(config.shared_expert_intermediate_size, has_gate=True)
    return _experts(config, routing, shared=shared)


def _qwen3_moe(config: Any) -> Experts | None:
    if not config.num_experts:
        return None
    return _experts(config, _softmax(config), layers=_at_steps(config))


def _mellum(config: Any) -> Experts:
    return _experts(config, _softmax(config), layers=_sparse(config))


def _olmoe(config: Any) -> Experts:
    return _experts(config, _softmax(config))


def _mixtral(config: Any) -> Experts:
    return _experts(config, Routing(config.num_experts_per_tok, is_normed=True))


def _gpt_oss(config: Any) -> Experts:
    return _experts(
        config,
        Routing(config.num_experts_per_tok, has_bias=True, chooses_by_product=True, is_rounded=True),
        stacked=Stacked(is_transposed=True, is_in_turn=True),
        has_bias=True,
        clamp=Clamp(float(config.swiglu_alpha), float(config.swiglu_limit)),
    )


def _granite(config: Any) -> Experts:
    routing = Routing(config.num_experts_per_tok, chooses_by_product=True, is_rounded=True)
    width = getattr(config, "shared_intermediate_size", 0)
    shared = SharedMlp(width, is_joined=True) if width else None
    return _experts(config, routing, stacked=Stacked(), shared=shared)


def _granite_hybrid(config: Any) -> Experts | None:
    return _granite(config) if config.num_local_experts else None


def _nemotron(config: Any) -> Experts:
    layers = tuple(kind == "moe" for kind in config.layer_types)
    shared = SharedMlp(config.moe_shared_expert_intermediate_size)
    latent = config.moe_latent_size
    return _experts(config, _grouped(config), layers=layers, shared=shared, latent_size=latent)


def _lfm2_moe(config: Any) -> Experts:
    routing = Routing(
        config.num_experts_per_tok,
        score=Score.SIGMOID,
        choice_bias=(_count(config),) if config.use_expert_bias else None,
        is_normed=bool(config.norm_topk_prob),
        epsilon=_LFM_EPSILON,
        scale=float(config.routed_scaling_factor),
        is_rounded=True,
    )
    layers = tuple(layer >= config.num_dense_layers for layer in range(config.num_hidden_layers))
    return _experts(config, routing, layers=layers)


def _aria(config: Any) -> Experts:
    routing = Routing(config.moe_topk, chooses_by_product=True, is_rounded=True)
    shared = SharedMlp(config.intermediate_size * config.moe_num_shared_experts)
    return _experts(config, routing, stacked=Stacked(is_transposed=True), shared=shared)


def _glm4_moe(config: Any) -> Experts:
    shared = _shared(config, config.n_shared_experts)
    return _experts(config, _grouped(config), layers=_after_dense(config), shared=shared)


def _deepseek_v2(config: Any) -> Experts:
    groups = None
    if config.topk_method == "group_limited_greedy":
        groups = Groups(config.n_group, config.topk_group, 1)
    routing = Routing(
        config.num_experts_per_tok, is_wide=True, groups=groups, scale=float(config.routed_scaling_factor)
    )
    shared = _shared(config, config.n_shared_experts)
    return _experts(config, routing, layers=_after_dense(config), shared=shared)


def _glm4_moe_lite(config: Any) -> Experts:
    shared = _shared(config, config.n_shared_experts)
    return _experts(config, _grouped(config), layers=_sparse(config), shared=shared)


def _solar_open(config: Any) -> Experts:
    return _experts(config, _grouped(config), shared=_shared(config, config.n_shared_experts))


def _exaone_moe(config: Any) -> Experts:
    shared = _shared(config, config.num_shared_experts)
    return _experts(config, _grouped(config), layers=_sparse(config), shared=shared)


def _hy_v3(config: Any) -> Experts:
    routing = Routing(
        config.num_experts_per_tok,
        is_wide=True,
        score=Score.SIGMOID,
        choice_bias=(_count(config),),
        is_normed=True,
        epsilon=_EPSILON,
        scale=float(config.router_scaling_factor),
    )
    shared = _shared(config, config.num_shared_experts)
    return _experts(config, routing, layers=_sparse(config), shared=shared)


def _minimax_m2(config: Any) -> Experts:
    routing = Routing(
        config.num_experts_per_tok, score=Score.SIGMOID, choice_bias=(_count(config),), is_normed=True
    )
    return _experts(config, routing)


def _ernie(config: Any) -> Experts:
    layers = tuple(
        (layer + 1) % config.moe_layer_interval == 0
        and config.moe_layer_start_index <= layer <= config.moe_layer_end_index
        for layer in range(config.num_hidden_layers)
    )
    routing = Routing(
        config.num_experts_per_tok,
        is_wide=True,
        choice_bias=(1, _count(config)),
        is_normed=True,
        floor=float(config.moe_norm_min),
        is_rounded=True,
    )
    return _experts(config, routing, layers=layers, shared=_shared(config, config.moe_num_shared_experts))


def _flint(config: Any) -> Experts:
    routing = Routing(
        config.num_experts_per_tok,
        is_wide=True,
        score=Score.SIGMOID,
        is_normed=bool(config.norm_topk_prob),
    )
    shared = SharedMlp(config.shared_expert_intermediate_size)
    return _experts(config, routing, layers=_at_steps(config), shared=shared)


def _kolibri(config: Any) -> Experts:
    routing = Routing(
        config.num_experts_per_tok,
        is_wide=True,
        score=Score.SIGMOID,
        chooses_by_product=True,
        choice_bias=(_count(config),),
        is_normed=bool(config.norm_topk_prob),
    )
    return _experts(config, routing, shared=SharedMlp(config.shared_expert_intermediate_size))


def _longcat(config: Any) -> Experts:
    num_identities = config.zero_expert_num or 0
    routing = Routing(
        config.num_experts_per_tok,
        is_wide=True,
        choice_bias=(_count(config) + num_identities,),
        scale=float(config.routed_scaling_factor),
    )
    layers = tuple(layer % 2 == 0 for layer in range(config.num_hidden_layers))
    return _experts(config, routing, layers=layers, num_identities=num_identities, is_shortcut=True)


_READERS: dict[str, Callable[[Any], Experts | None]] = {
    "aria_text": _aria,
    "bailing_hybrid": _glm4_moe_lite,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _glm4_moe,
    "dots1": _glm4_moe,
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _olmoe,
    "flint": _flint,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granite,
    "granitemoe_swa": _granite,
    "granitemoehybrid": _granite_hybrid,
    "granitemoeshared": _granite,
    "hy_v3": _hy_v3,
    "kimi_linear": _glm4_moe_lite,
    "kolibri1": _kolibri,
    "lfm2_moe": _lfm2_moe,
    "longcat_flash": _longcat,
    "mellum": _mellum,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen2_moe,
    "solar_open": _solar_open,
}
