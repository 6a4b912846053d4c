"""Gemma 3's config.json is read as transformers reads it, or left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from specray.engine.model.decoder_config import LinearScaling, RopeFormula
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.model.families.from_library import can_lower, decoder_config_of
from specray.engine.model.rotary import tables_of_layers
from tests.unit.engine.model.checkpoints import read_by_library

MAX_MODEL_LEN = 40
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
THETAS = st.sampled_from([500.0, 10_000.0, 1_000_000])
PLAIN = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 8,
}


def ropes() -> st.SearchStrategy[dict[str, Any]]:
    """In the form of older files, and in the new one."""
    linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": st.sampled_from([2.0, 8.0])})
    default = st.fixed_dictionaries({"rope_type": st.just("default")}, optional={"rope_theta": THETAS})
    older = st.fixed_dictionaries(
        {},
        optional={"rope_theta": THETAS, "rope_local_base_freq": THETAS, "rope_scaling": st.none() | linear},
    )
    kinds = st.fixed_dictionaries({"full_attention": default | linear, "sliding_attention": default})
    newer = st.fixed_dictionaries({"rope_parameters": kinds})
    return older | newer


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    num_layers = draw(st.integers(1, 8))
    kinds = st.sampled_from(["full_attention", "sliding_attention"])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "layer_types": st.none() | st.lists(kinds, min_size=num_layers, max_size=num_layers),
        "sliding_window": st.sampled_from([2, 7]),
        "sliding_window_pattern": st.integers(1, 4),
        "query_pre_attn_scalar": st.sampled_from([24, 256]),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
        "max_position_embeddings": st.sampled_from([64, 128]),
        "final_logit_softcapping": st.none(),
        "use_bidirectional_attention": st.sampled_from([None, False]),
    }
    values = draw(st.fixed_dictionaries({}, optional=optional))
    return {**PLAIN, "num_hidden_layers": num_layers, **values, **draw(ropes())}


@given(configs())
@FEW
def test_every_field_is_read_as_the_library_reads_it(directory: Path, values: dict[str, Any]) -> None:
    parsed = read_decoder_config(values)
    config = read_by_library(values, directory)
    assert parsed is not None and can_lower(config)
    assert decoder_config_of(config, max_model_len=MAX_MODEL_LEN) == parsed
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert theirs == parsed.weight_shapes()
    windows = tuple(layer.self_attn.sliding_window for layer in model.model.layers)
    assert parsed.windows == windows
    assert parsed.query_scale == model.model.layers[0].self_attn.scaling
    tables, rotary = (
        tables_of_layers(parsed, MAX_MODEL_LEN, torch.device("cpu")),
        Gemma3RotaryEmbedding(config),
    )
    positions = torch.arange(MAX_MODEL_LEN)[None]
    for layer, kind in enumerate(config.layer_types):
        expected = rotary(torch.empty(0), positions, kind)
        for own, other in zip(tables.kinds[tables.of_layers[layer]], expected, strict=True):
            assert torch.equal(own, other[0])


def test_the_type_has_its_own_defaults(directory: Path) -> None:
    values = {"model_type": "gemma3_text"}
    parsed = read_decoder_config(values)
    assert parsed == decoder_config_of(read_by_library(values, directory), max_model_len=MAX_MODEL_LEN)
    assert parsed is not None
    assert parsed.windows == ((4096,) * 5 + (None,)) * 4 + (4096, 4096)
    assert parsed.ropes[4:6] == (RopeFormula(10_000.0), RopeFormula(1_000_000.0))


def test_scaling_of_older_files_is_for_full_attention() -> None:
    parsed = read_decoder_config(
        {**PLAIN, "sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    assert parsed is not None
    assert parsed.ropes[1:] == (RopeFormula(10_000.0), RopeFormula(1_000_000.0, LinearScaling(8.0)))


@pytest.mark.parametrize(
    "values",
    [
        {**PLAIN, "hidden_activation": "silu"},
        {**PLAIN, "use_bidirectional_attention": True},
        {**PLAIN, "final_logit_softcapping": 30.0},
        {**PLAIN, "attn_logit_softcapping": 50.0},
        {**PLAIN, "hidden_size": 30},
        {**PLAIN, "num_key_value_heads": 3},
        {**PLAIN, "head_dim": 7},
        {**PLAIN, "rms_norm_eps": 1},
        {**PLAIN, "layer_types": ["full_attention"]},
        {**PLAIN, "layer_types": ["full_attention", "full_attention", "chunked_attention"]},
        {**PLAIN, "query_pre_attn_scalar": 0},
        {**PLAIN, "sliding_window_pattern": 0},
        {**PLAIN, "sliding_window": 1},
        {**PLAIN, "sliding_window": None},
        {**PLAIN, "_sliding_window_pattern": "6"},
        {**PLAIN, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {**PLAIN, "rope_parameters": {"rope_type": "default"}},
        {**PLAIN, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {**PLAIN, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {**PLAIN, "cache_implementation": "hybrid"},
    ],
)
def test_anything_else_is_left_to_the_library(values: dict[str, Any]) -> None:
    assert read_decoder_config(values) is None
