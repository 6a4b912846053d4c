"""More families of the zoo, for text alone; layers of four, so that each kind of a pattern comes twice."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.model.families.family import GROUPED, OWN_CODE, Family

LAYERS = {**GROUPED, "num_hidden_layers": 4}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
OWN_MASK = "its attention has a mask of its own"
OFF = "over the block cache its logits are off by"

_VALUES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **LAYERS,
        **WINDOWED,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
    },
    "apertus": {**LAYERS},
    "arcee": {**LAYERS, "head_dim": 8},
    "aria_text": {**LAYERS, "head_dim": 8, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "biogpt": {"num_hidden_layers": 4},
    "bitnet": {**LAYERS},
    "cohere2_moe": {
        **LAYERS,
        **WINDOWED,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "prefix_dense_intermediate_size": 48,
        "mlp_layer_types": ["sparse", "sparse", "sparse", "sparse"],
    },
    "cwm": {**LAYERS, **WINDOWED, "head_dim": 8},
    "dots1": {
        **LAYERS,
        **WINDOWED,
        **ROUTED,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "ernie4_5_moe": {
        **LAYERS,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "moe_num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "exaone_moe": {
        **LAYERS,
        **WINDOWED,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    },
    "flex_olmo": {**LAYERS, **ROUTED, "num_experts": 4},
    "flint": {
        **LAYERS,
        **WINDOWED,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 24,
    },
    "gemma4_unified_text": {**LAYERS, **WINDOWED, "head_dim": 8},
    "glm": {**LAYERS, "head_dim": 8},
    "glm4_moe": {
        **LAYERS,
        **ROUTED,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "granite_swa": {**LAYERS, **WINDOWED},
    "granitemoe": {**LAYERS, **ROUTED},
    "granitemoe_swa": {**LAYERS, **WINDOWED, **ROUTED, "shared_intermediate_size": 24},
    "granitemoeshared": {**LAYERS, **ROUTED, "shared_intermediate_size": 24},
    "helium": {**LAYERS, "head_dim": 8},
    "hunyuan_v1_dense": {**LAYERS, "head_dim": 8},
    "hunyuan_v1_moe": {**LAYERS, **ROUTED, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {
        **LAYERS,
        **ROUTED,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    },
    "hyperclovax": {**LAYERS, "head_dim": 8},
    "internlm3": {**LAYERS, "head_dim": 8},
    "iquestcoder": {**LAYERS, "head_dim": 8},
    "jais2": {**LAYERS, "head_dim": 8},
    "jetmoe": {**LAYERS, **ROUTED, "head_dim": 8},
    "kolibri1": {
        **LAYERS,
        **WINDOWED,
        **ROUTED,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
    },
    "mellum": {
        **LAYERS,
        **WINDOWED,
        **ROUTED,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "mlp_layer_types": ["sparse", "sparse", "sparse", "sparse"],
    },
    "minimax_m2": {**LAYERS, **ROUTED, "head_dim": 8, "num_experts": 4},
    "ministral": {
        **LAYERS,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    },
    "ministral3": {**LAYERS, "head_dim": 8, "sliding_window": 8},
    "nanochat": {**LAYERS},
}

MORE: dict[str, Family] = {
    **{name: Family(name, values) for name, values in _VALUES.items()},
    "codegen": Family("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, OWN_CODE),
    "gpt_neox_japanese": Family("gpt_neox_japanese", {}, OWN_CODE),
    "mpt": Family("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, OWN_CODE),
    "diffllama": Family("diffllama", LAYERS, OFF),
    "doge": Family("doge", LAYERS, OWN_MASK),
}
