"""What the decoder takes of each family, and what it leaves to forward hf."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specray.engine.activation import Clamp
from specray.engine.model.checkpoint.names import decoder_name
from specray.engine.model.decoder_config import RopeFormula, layer_prefix
from specray.engine.model.families.from_library import can_lower, decoder_config_of
from specray.engine.model.layers.experts.config import Routing
from specray.engine.model.library import LibraryConfig
from specray.engine.model.rotary import rotated_first
from specray.engine.step import StateShape
from tests.unit.engine.model.checkpoints import library_class

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
}


def config_of(model_type: str, **values: Any) -> Any:
    return AutoConfig.for_model(model_type, **SMALL, **values)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3_moe", {"hidden_act": "relu"}),
        ("gemma3_text", {"hidden_activation": "gelu"}),
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"query_pre_attn_scalar": 0}),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
        ),
        ("granite", {"residual_multiplier": 0.0}),
        ("granite", {"logits_scaling": 0.0}),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 0}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 5}),
        ("gpt_oss", {"num_local_experts": 4, "hidden_act": "gelu"}),
        ("olmo2", {}),
        ("llama", {"per_layer_config": {"1": {"intermediate_size": 24}}}),
    ],
)
def test_what_is_left_to_the_other_forward(model_type: str, values: dict[str, Any]) -> None:
    assert not can_lower(config_of(model_type, **values))


def test_gelu_of_a_llama_is_taken() -> None:
    assert can_lower(config_of("llama", hidden_act="gelu_pytorch_tanh"))


def test_smollm3_has_layers_without_positions() -> None:
    config = config_of("smollm3", no_rope_layers=[1, 0, 1, 0, 1], rope_parameters={"rope_type": "default"})
    rope = RopeFormula(2_000_000.0)
    decoder = decoder_config_of(config, max_model_len=64)
    assert decoder.ropes == (rope, None, rope, None)
    assert decoder.windows == (None,) * 4


def test_windows_of_smollm3_count_only_where_they_are_used() -> None:
    values = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    windows = [
        decoder_config_of(config_of("smollm3", use_sliding_window=used, **values), max_model_len=64).windows
        for used in (False, True)
    ]
    assert windows == [(None,) * 4, (8, None, 8, None)]


def test_part_of_a_head_is_rotated() -> None:
    config = config_of("phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    decoder = decoder_config_of(config, max_model_len=64)
    assert (decoder.head_dim, decoder.rotary_dim, decoder.has_joined_queries) == (8, 4, True)
    order = rotated_first(decoder)
    # The pairs (0, 2) and (1, 3) lie half a head apart.
    assert order is not None and order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_layers_of_qwen3_moe_with_one_mlp() -> None:
    config = config_of(
        "qwen3_moe", num_experts=9, moe_intermediate_size=24, mlp_only_layers=[3], decoder_sparse_step=2
    )
    experts = decoder_config_of(config, max_model_len=64).experts
    assert experts is not None
    assert experts.layers == (False, True, False, False)
    assert (experts.num_experts, experts.routing) == (9, Routing(8, is_rounded=True))


def test_experts_of_mixtral_are_as_wide_as_its_mlp() -> None:
    decoder = decoder_config_of(config_of("mixtral", num_local_experts=4), max_model_len=64)
    assert decoder.moe_intermediate_size == 48
    shapes = decoder.weight_shapes()
    assert shapes["model.layers.3.mlp.experts.3.down_proj.weight"] == (32, 48)
    assert shapes["model.layers.0.mlp.gate.weight"] == (4, 32)
    assert "model.layers.0.mlp.down_proj.weight" not in shapes


def test_gpt_oss_has_sinks_clamps_and_windows_in_turn() -> None:
    config = config_of("gpt_oss", num_local_experts=6, swiglu_limit=5.0, sliding_window=8)
    decoder = decoder_config_of(config, max_model_len=64)
    experts = decoder.experts
    assert experts is not None and decoder.has_sinks
    routing = Routing(4, has_bias=True, chooses_by_product=True, is_rounded=True)
    assert (experts.num_experts, experts.routing) == (6, routing)
    assert experts.clamp == Clamp(gain=1.702, limit=5.0)
    assert decoder.windows == (8, None, 8, None)
    assert decoder.has_qkv_bias and decoder.has_output_bias and not decoder.has_mlp_bias
    shapes = decoder.weight_shapes()
    assert shapes["model.layers.3.self_attn.sinks"] == (decoder.num_attention_heads,)
    assert shapes["model.layers.3.mlp.experts.gate_up_proj"] == (6, 32, 96)
    assert shapes["model.layers.3.mlp.experts.gate_up_proj_bias"] == (6, 96)
    assert shapes["model.layers.3.mlp.experts.down_proj"] == (6, 48, 32)
    assert shapes["model.layers.3.mlp.gate.bias"] == (6,)


def test_the_shortest_original_context_of_any_layer_limits_the_length() -> None:
    """Beyond it, some frequencies depend on the longest sequence of a batch."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    config = config_of("gemma3_text", max_position_embeddings=8192, head_dim=8)
    config.rope_parameters = {"full_attention": longrope, "sliding_attention": plain}
    assert LibraryConfig(config, config).max_model_len == 1024
    config.rope_parameters = {"full_attention": plain, "sliding_attention": plain}
    assert LibraryConfig(config, config).max_model_len == 8192


def test_kimi_linear_as_it_is_published() -> None:
    """Layers are counted from one, a theta is named and not used, and ``head_dim`` is of no kind of layer."""
    full = [4, 8, 12, 16, 20, 24, 27]
    config = AutoConfig.for_model(
        "kimi_linear",
        head_dim=72,
        linear_attn_config={
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, 28) if layer not in full],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        model_max_length=1_048_576,
        moe_renormalize=True,
        num_expert_group=1,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        rope_theta=10_000.0,
    )
    assert can_lower(config)
    decoder = decoder_config_of(config, max_model_len=4_096)
    assert decoder.attention_layers == tuple(layer - 1 for layer in full)
    assert set(decoder.ropes) == {None} and rotated_first(decoder) is None
    assert decoder.query_scale == 192**-0.5 and decoder.head_dim == 64 and decoder.rotary_dim is None
    assert decoder.experts is not None and decoder.experts.layers == (False, *(True,) * 26)
    assert decoder.recurrent is not None
    assert decoder.recurrent.shared_fields == {"linear_num_heads": 32}
    assert decoder.recurrent.state_shape(2) == StateShape(16, 16, 128, 128, 128, 3 * 2_048, 4)
    shapes = decoder.weight_shapes()
    assert shapes[f"{layer_prefix(0)}self_attn.A_log"] == (1, 1, 32, 1)
    assert shapes[f"{layer_prefix(0)}self_attn.dt_bias"] == (4_096,)
    with torch.device("meta"):
        model = library_class(config).from_config(config)
    expected = sum(tensor.numel() for tensor in model.state_dict().values())
    assert sum(map(math.prod, shapes.values())) == expected == 49_122_681_728


def test_ling_3_as_it_is_published() -> None:
    """Names of older files, a decay for each of a key's numbers, which has a bound, and gates of heads."""
    config = AutoConfig.for_model("bailing_hybrid")
    assert can_lower(config)
    decoder = decoder_config_of(config, max_model_len=4_096)
    assert decoder.attention_layers == (5, 11, 17, 23, 29, 35, 41)
    assert decoder.has_neighbour_pairs and decoder.has_head_gates and decoder.query_scale == 192**-0.5
    assert decoder.recurrent is not None
    assert decoder.recurrent.state_shape(2) == StateShape(16, 16, 128, 128, 128, 3 * 2_048, 4)
    shapes, first, last = decoder.weight_shapes(), layer_prefix(0), layer_prefix(5)
    assert shapes[f"{first}self_attn.f_proj.weight"] == (4_096, 2_560)
    assert {f"{first}self_attn.A_log", f"{first}self_attn.k_conv1d.weight"} <= decoder.wide_weights()
    names = {
        f"{first}attention.forget_gate.f_proj.weight": f"{first}self_attn.f_proj.weight",
        f"{last}attention.dense.weight": f"{last}self_attn.o_proj.weight",
        f"{first}attention.dt_bias": f"{first}self_attn.dt_bias",
        f"{first}mlp.gate.expert_bias": f"{first}mlp.gate.e_score_correction_bias",
        "model.word_embeddings.weight": "model.embed_tokens.weight",
    }
    assert {name: decoder_name(name) for name in names} == names
    with torch.device("meta"):
        model = library_class(config).from_config(config)
    expected = sum(tensor.numel() for tensor in model.state_dict().values())
    assert sum(map(math.prod, shapes.values())) == expected
