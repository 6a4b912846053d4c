"""Configurations are read as transformers reads them, or left to it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from specray.demo.paths import demo_draft_path, demo_target_path, smollm2_draft_path
from specray.engine.model.decoder_config import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    RopeFormula,
)
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.model.families.from_library import decoder_config_of
from specray.engine.model.rotary import cos_sin
from tests.unit.engine.model.checkpoints import read_by_library

CPU = torch.device("cpu")
TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_MODEL_LEN = 40

MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def ropes() -> st.SearchStrategy[dict[str, Any]]:
    """Keys of config.json that describe rotary embeddings, in the old form and in the new one."""
    theta = st.sampled_from([500.0, 10_000.0, 1_000_000])
    kinds = st.one_of(
        st.fixed_dictionaries({"rope_type": st.just("default")}),
        st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": st.sampled_from([2, 2.5, 8.0])}),
        st.fixed_dictionaries(
            {
                "rope_type": st.just("llama3"),
                "factor": st.sampled_from([8.0, 32, 1.5]),
                "low_freq_factor": st.sampled_from([1.0, 1]),
                "high_freq_factor": st.sampled_from([4.0, 2]),
            },
            optional={"original_max_position_embeddings": st.sampled_from([16, 64, 8192])},
        ),
    )
    new = st.builds(
        lambda kind, theta: {"rope_parameters": {**kind, **({} if theta is None else {"rope_theta": theta})}},
        kinds,
        st.none() | theta,
    )
    old = st.builds(
        lambda kind, theta, name, scaled: {
            **({} if theta is None else {"rope_theta": theta}),
            "rope_scaling": {name: kind.pop("rope_type"), **kind} if scaled else None,
        },
        kinds.map(dict),
        st.none() | theta,
        st.sampled_from(["type", "rope_type"]),
        st.booleans(),
    )
    return st.one_of(st.just({}), new, old)


@st.composite
def configs(draw: st.DrawFn, model_type: str | None = None) -> dict[str, Any]:
    """config.json of a small model, any field of which may be missing where the type has a default."""
    model_type = model_type or draw(st.sampled_from(TYPES))
    num_layers = draw(st.integers(1, 4))
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "vocab_size": st.just(96),
        "intermediate_size": st.just(48),
        "max_position_embeddings": st.sampled_from([64, 128]),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
        "hidden_act": st.just("silu"),
        "tie_word_embeddings": st.booleans(),
        "torch_dtype": st.sampled_from(["bfloat16", "float32"]),
        "eos_token_id": st.sampled_from([None, 1, [1, 2]]),
        "attention_dropout": st.just(0.0),
        "head_dim": st.sampled_from([2, 16, None] if model_type in ("llama", "mistral") else [2, 16]),
    }
    if model_type in ("llama", "qwen3"):
        optional["attention_bias"] = st.booleans()
    if model_type == "llama":
        optional |= {"mlp_bias": st.booleans(), "pretraining_tp": st.just(1)}
    if model_type != "llama":
        optional["sliding_window"] = st.sampled_from([None, 7])
    if model_type in ("qwen2", "qwen3"):
        optional |= {"use_sliding_window": st.booleans(), "max_window_layers": st.integers(0, 5)}
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        optional["layer_types"] = st.none() | st.lists(kinds, min_size=num_layers, max_size=num_layers)
    values = {
        "model_type": model_type,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": num_layers,
    }
    return {**values, **draw(st.fixed_dictionaries({}, optional=optional)), **draw(ropes())}


def library_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def library_windows(model: Any) -> tuple[int | None, ...]:
    if model.config.model_type == "mistral":
        return (model.config.sliding_window,) * len(model.model.layers)
    return tuple(getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers)


def library_tables(config: Any, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    kind = next(value for name, value in vars(module).items() if name.endswith("RotaryEmbedding"))
    cos, sin = kind(config)(torch.empty(0), position_ids=torch.arange(max_model_len)[None])
    return cos[0], sin[0]


def assert_same_model(parsed: DecoderConfig, config: Any, max_model_len: int = MAX_MODEL_LEN) -> None:
    """The same modules of the same sizes, the same windows, and the same rotary tables to the last bit."""
    model = library_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert parsed.weight_shapes() == shapes
    attention = model.model.layers[0].self_attn
    assert (parsed.head_dim, parsed.num_attention_heads // parsed.num_key_value_heads) == (
        attention.head_dim,
        attention.num_key_value_groups,
    )
    assert parsed.windows == library_windows(model)
    assert parsed.rms_norm_eps == model.model.norm.variance_epsilon
    assert parsed.max_position_embeddings == config.max_position_embeddings
    for own, theirs in zip(
        cos_sin(parsed, max_model_len, CPU), library_tables(config, max_model_len), strict=True
    ):
        assert torch.equal(own, theirs)


def has_sliding_layers_without_a_window(values: Mapping[str, Any]) -> bool:
    """Whether the library makes no cache for the layers of a Qwen model, so nothing says what is right."""
    has_window = values.get("use_sliding_window", False) and values.get("sliding_window", 1) is not None
    return "sliding_attention" in (values.get("layer_types") or ()) and not has_window


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_is_read_as_the_library_reads_it(model_type: str, directory: Path) -> None:
    @given(configs(model_type))
    @MANY
    def check(values: dict[str, Any]) -> None:
        parsed = read_decoder_config(values)
        if has_sliding_layers_without_a_window(values):
            assert parsed is None
            return
        config = read_by_library(values, directory)
        assert parsed is not None
        assert_same_model(parsed, config)
        assert decoder_config_of(config, max_model_len=MAX_MODEL_LEN) == parsed

    check()


# fmt: off
_FIELDS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "attention_bias", "mlp_bias", "vocab_size", "tie_word_embeddings",
    "hidden_act", "dtype", "eos_token_id", "initializer_range", "use_cache", "partial_rotary_factor",
    "num_labels", "is_encoder_decoder", "index_topk", "attention_dropout", "architectures",
    "transformers_version", "original_max_position_embeddings", "auto_map", "id2label", "label2id",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
)
# fmt: on


@pytest.mark.slow
@given(
    configs(),
    st.sampled_from(_FIELDS),
    st.sampled_from(
        [None, True, 0, -1, 3, 1.5, 1, "x", "gelu", "float16", [], ["x"], {}, {"rope_type": "yarn"}]
    ),
)
@settings(MANY, max_examples=80)
def test_what_is_read_at_all_is_what_the_library_reads(
    directory: Path, values: dict[str, Any], field: str, value: Any
) -> None:
    values = {**values, field: value}
    parsed = read_decoder_config(values)
    if parsed is None:
        return
    config = read_by_library(values, directory)
    assert decoder_config_of(config, max_model_len=MAX_MODEL_LEN) == parsed


@pytest.mark.parametrize("model_type", TYPES)
def test_each_type_has_its_own_defaults(model_type: str, directory: Path) -> None:
    values = {"model_type": model_type, "num_hidden_layers": 2}
    parsed = read_decoder_config(values)
    assert parsed is not None
    assert_same_model(parsed, read_by_library(values, directory))
    whole = read_decoder_config({"model_type": model_type})
    assert whole == replace(parsed, num_hidden_layers=32, windows=whole.windows if whole else ())
    assert whole is not None and len(whole.windows) == 32


@pytest.mark.parametrize("model_type", TYPES)
def test_a_file_with_every_field_of_the_library_is_read_without_it(model_type: str, directory: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    written = AutoConfig.for_model(model_type, **sizes).to_dict()
    values = json.loads(json.dumps(written))
    assert {"id2label", "return_dict", "chunk_size_feed_forward", "output_attentions"} <= values.keys()
    parsed = read_decoder_config(values)
    assert parsed is not None
    assert_same_model(parsed, read_by_library(values, directory))


MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_mixture_is_read_as_the_library_reads_it(model_type: str, is_whole: bool, directory: Path) -> None:
    """With its own defaults, and with every field that the library writes."""
    values: dict[str, Any] = {"model_type": model_type, "num_hidden_layers": 3}
    if is_whole:
        values = json.loads(json.dumps(AutoConfig.for_model(model_type, **SMALL).to_dict()))
    parsed = read_decoder_config(values)
    assert parsed is not None and parsed.experts is not None
    assert parsed == decoder_config_of(read_by_library(values, directory), max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mixtral", {"num_local_experts": 6, "head_dim": 16, "sliding_window": 7}),
        ("mixtral", {"rope_theta": 5_000.0, "router_aux_loss_coef": 0.02, "draft_vocab_size": 9}),
        (
            "olmoe",
            {"attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 3},
        ),
        (
            "qwen2_moe",
            {"mlp_only_layers": [1], "qkv_bias": False, "sliding_window": 0},
        ),
        ("qwen2_moe", {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 16}),
        ("qwen2_moe", {"decoder_sparse_step": 4}),
        ("qwen3_moe", {"head_dim": 128, "max_window_layers": 48, "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7, "mlp_only_layers": []}),
    ],
)
def test_fields_of_mixtures(model_type: str, fields: dict[str, Any], directory: Path) -> None:
    values = {"model_type": model_type, **SMALL, **fields}
    expected = decoder_config_of(read_by_library(values, directory), max_model_len=MAX_MODEL_LEN)
    assert read_decoder_config(values) == expected


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("olmoe", {"clip_qkv": 8.0}),
        ("mixtral", {"num_key_value_heads": None}),
        ("mixtral", {"num_experts": 4}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("qwen2_moe", {"use_sliding_window": True}),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
        ("qwen3_moe", {"num_experts": 0}),
        ("qwen3_moe", {"mlp_only_layers": 1}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"norm_topk_prob": 1}),
        ("qwen3_moe", {"quantization_config": {"bits": 4}}),
    ],
)
def test_mixtures_that_are_left_to_the_library(model_type: str, fields: dict[str, Any]) -> None:
    assert read_decoder_config({"model_type": model_type, **SMALL, **fields}) is None


def test_the_draft_of_the_default_model_is_read_without_the_library() -> None:
    values = json.loads((smollm2_draft_path() / "config.json").read_text())
    # It is completed by what this names, and has it no more.
    del values["target_embedding"]
    parsed = read_decoder_config(values)
    assert parsed is not None and parsed.draft_vocab_size == values["draft_vocab_size"]


@pytest.mark.parametrize("path", [demo_target_path(), demo_draft_path()])
def test_embedded_pair(path: Path) -> None:
    parsed = read_decoder_config(json.loads((path / "config.json").read_text()))
    assert parsed is not None
    assert_same_model(parsed, AutoConfig.from_pretrained(path), max_model_len=2048)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("rope", [YARN, LONGROPE, DYNAMIC], ids=lambda rope: str(rope["rope_type"]))
@pytest.mark.parametrize("model_type", TYPES)
def test_ropes_that_only_the_library_has(model_type: str, rope: dict[str, Any], directory: Path) -> None:
    values = {
        "model_type": model_type,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_scaling": rope,
        "rope_theta": 5_000.0,
    }
    assert read_decoder_config(values) is None
    config = read_by_library(values, directory)
    assert_same_model(decoder_config_of(config, max_model_len=60), config, max_model_len=60)


PLAIN = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model_type": "gpt2"},
        {"model_type": ["llama"]},
        {**PLAIN, "hidden_act": "gelu"},
        {**PLAIN, "partial_rotary_factor": 0.5},
        {**PLAIN, "sliding_window": 7},
        {**PLAIN, "num_nextn_predict_layers": 1},
        {**PLAIN, "hidden_size": 30},
        {**PLAIN, "head_dim": 7},
        {**PLAIN, "head_dim": 0},
        {**PLAIN, "num_key_value_heads": 3},
        {**PLAIN, "num_hidden_layers": 0},
        {**PLAIN, "num_hidden_layers": True},
        {**PLAIN, "tie_word_embeddings": None},
        {**PLAIN, "is_encoder_decoder": True},
        {**PLAIN, "output_hidden_states": True},
        {**PLAIN, "return_dict": False},
        {**PLAIN, "chunk_size_feed_forward": 4},
        {**PLAIN, "id2label": {"x": "y"}},
        {**PLAIN, "quantization_config": {"quant_method": "awq"}},
        {**PLAIN, "rope_theta": None},
        {**PLAIN, "rope_parameters": {"rope_type": "linear"}},
        {**PLAIN, "rope_parameters": {"rope_type": "default", "factor": 2.0}},
        {**PLAIN, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {**PLAIN, "rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        {**PLAIN, "rope_parameters": [1]},
        {"model_type": "mistral", "num_key_value_heads": None},
        {"model_type": "mistral", "layer_types": ["full_attention"]},
        {"model_type": "mistral", "sliding_window": 1},
        {"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention"]},
        {"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        {"model_type": "qwen2", "head_dim": None},
        {"model_type": "qwen3", "head_dim": None},
    ],
)
def test_anything_else_is_left_to_the_library(values: dict[str, Any]) -> None:
    assert read_decoder_config(values) is None


def test_older_names_of_rotary_settings() -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}
    parsed = read_decoder_config({**PLAIN, **old})
    assert parsed is not None and parsed.rope == RopeFormula(500.0, LinearScaling(2.0))
    new = {
        "rope_theta": 500.0,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0}
        | {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    }
    parsed = read_decoder_config({**PLAIN, **new})
    assert parsed is not None and parsed.rope == RopeFormula(7.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
