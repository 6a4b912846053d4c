"""Keys of a GGUF header: what each says in config.json, or the sentence that refuses the file by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from specray.errors import ConfigError
from specray.gguf.header import read_header
from specray.models.conversion import check_convertible
from specray.models.gguf.families import read_config
from tests.unit.models.gguf_files.families import HEAD_DIM, HEADS, HIDDEN, LAYERS, MODELS
from tests.unit.models.gguf_files.writer import add_value
from tests.unit.models.tiny_models import MERGES, TOKENS, finish

NAMES = {tiny.architecture: name for name, tiny in reversed(MODELS.items())}
"""A model of each architecture."""


def write(path: Path, name: str = "llama", keys: Mapping[str, Any] | None = None, **tensors: Any) -> Path:
    """Writes a header, with the embedding alone; ``keys`` with a dot before them are no architecture's."""
    tiny = MODELS[name]
    writer = gguf.GGUFWriter(path, tiny.architecture)
    values: dict[str, Any] = {
        ".tokenizer.ggml.model": "gpt2",
        ".tokenizer.ggml.pre": "gpt-2",
        ".tokenizer.ggml.tokens": TOKENS,
        ".tokenizer.ggml.merges": MERGES,
        ".tokenizer.ggml.eos_token_id": 1,
        **tiny.header,
        **(keys or {}),
    }
    for key, value in values.items():
        add_value(writer, key[1:] if key.startswith(".") else f"{tiny.architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), HIDDEN), dtype=np.float32))
    for tensor, factors in {**tiny.factors, **tensors}.items():
        writer.add_tensor(tensor.replace("__", "."), np.array(factors, dtype=np.float32))
    return finish(writer, path)


def config_of(path: Path) -> dict[str, Any]:
    header = read_header(path)
    check_convertible(path, header)
    return read_config(path, header)[0]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        check_convertible(path, read_header(path))
    sentence = str(refused.value)
    assert "\n" not in sentence
    start = f"{path} (architecture {read_header(path).architecture!r}) cannot be converted: "
    assert sentence.startswith(start)
    return sentence.removeprefix(start)


@pytest.mark.parametrize("architecture", NAMES)
def test_a_key_that_no_family_knows_refuses_the_file_by_its_name(tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path / "x.gguf", NAMES[architecture], {"attention.new_kind": 1})
    assert refusal(path) == (
        f"{architecture}.attention.new_kind is 1, which is not read; allowed: a file without this key"
    )


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("llama", {"expert_count": 8}, "llama.expert_count is 8, which is not read; allowed: 0"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale is 0.5, which is not read; allowed: 0.0 or 1.0"),
        ("llama", {"attention.scale": 0.5}, "llama.attention.scale is 0.5, which is not read; allowed: 0.0"),
        (
            "llama",
            {"attention.causal": False},
            "llama.attention.causal is False, which is not read; allowed: True",
        ),
        ("qwen3", {"pooling_type": 3}, "qwen3.pooling_type is 3, which is not read; allowed: 0"),
        (
            "qwen2",
            {"attention.sliding_window": 8},
            "qwen2.attention.sliding_window is 8, which is not read; allowed: 0",
        ),
        ("starcoder2", {"attention.sliding_window": 8}, "starcoder2.attention.sliding_window is 8, which"),
        (
            "gemma3",
            {"attn_logit_softcapping": 50.0},
            "gemma3.attn_logit_softcapping is 50.0, which is not read",
        ),
        ("gemma2", {"rope.freq_base_swa": 5e4}, "gemma2.rope.freq_base_swa is 50000.0; allowed: 10000.0"),
        ("gpt2", {"rope.freq_base": 1e4}, "gpt2.rope.freq_base is 10000.0, which is not read"),
        ("gpt2", {"attention.head_count_kv": 1}, "gpt2.attention.head_count_kv is 1; allowed: 4"),
        ("qwen3moe", {"expert_weights_norm": False}, "qwen3moe.expert_weights_norm is False; allowed: True"),
        (
            "qwen3moe",
            {"expert_weights_scale": 2.5},
            "qwen3moe.expert_weights_scale is 2.5, which is not read",
        ),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func is 2, which is not read"),
        ("qwen2moe", {"expert_used_count": None}, "qwen2moe.expert_used_count is missing"),
        (
            "llama",
            {"rope.dimension_count": 8},
            "llama.rope.dimension_count is 8; allowed: 16, the size of a head",
        ),
        (
            "phi3",
            {"rope.dimension_count": 7},
            "phi3.rope.dimension_count is 7; allowed: an even number up to 16",
        ),
        ("llama", {"attention.value_length": 8}, "llama.attention.value_length is 8; allowed: 16"),
        (
            "llama",
            {"rope.scaling.type": "dynamic"},
            "llama.rope.scaling.type is 'dynamic'; allowed: none, linear, yarn",
        ),
        (
            "llama",
            {"rope.scaling.type": "longrope"},
            "llama.rope.scaling.type is 'longrope'; allowed: with the tensor",
        ),
        ("llama", {"rope.scaling.alpha": 1000.0}, "llama.rope.scaling.alpha is 1000.0, which is not read"),
        (
            "llama",
            {"rope.scaling.attn_factor": 2.0},
            "llama.rope.scaling.attn_factor is 2.0, which is not read",
        ),
        (
            "llama-yarn",
            {"rope.scaling.yarn_ext_factor": 0.5},
            "llama.rope.scaling.yarn_ext_factor is 0.5; allowed: -1.0",
        ),
        (
            "llama-yarn",
            {"rope.scaling.yarn_attn_factor": 1.0},
            "llama.rope.scaling.yarn_attn_factor is 1.0; allowed: 1.13",
        ),
        (
            "llama-yarn",
            {"rope.scaling.yarn_log_multiplier": 0.1},
            "llama.rope.scaling.yarn_log_multiplier is 0.1",
        ),
        (
            "llama-llama3",
            {"rope.scaling.factor": 2.0},
            "llama.rope.scaling.factor is 2.0; allowed: 1 beside a tensor",
        ),
        (
            "lfm2",
            {"attention.head_count_kv": [0, 0]},
            "lfm2.attention.head_count_kv is [0, 0]; allowed: one number",
        ),
        (
            "lfm2",
            {"attention.head_count_kv": [2]},
            "lfm2.attention.head_count_kv is [2]; allowed: 2 whole numbers",
        ),
        ("qwen35", {"ssm.inner_size": 63}, "qwen35.ssm.inner_size is 63; allowed: a multiple of 4"),
    ],
)
def test_a_value_that_would_be_passed_over_refuses_the_file(
    tmp_path: Path, name: str, keys: dict[str, Any], sentence: str
) -> None:
    assert refusal(write(tmp_path / "x.gguf", name, keys)).startswith(sentence)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("block_count", None, "is missing"),
        ("block_count", "2", "is '2'"),
        ("block_count", True, "is True"),
        ("block_count", 0, "is 0"),
        ("block_count", 2.0, "is 2.0"),
        ("attention.head_count", [4, 2], "is [4, 2]"),
        ("feed_forward_length", [96, 64], "is [96, 64]"),
        ("context_length", list(range(5000)), "is an array of 5000"),
        ("embedding_length", ["a", "b"], "is an array of 2"),
        ("attention.layer_norm_rms_epsilon", None, "is missing"),
        ("attention.layer_norm_rms_epsilon", "1e-5", "is '1e-5'"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "is nan"),
        ("rope.freq_base", 0.0, "is 0.0"),
        ("rope.freq_base", False, "is False"),
        ("rope.scaling.type", 3, "is 3"),
        ("vocab_size", 259, "is 259"),
    ],
)
def test_a_value_of_another_type_or_range_is_named(
    tmp_path: Path, key: str, value: Any, problem: str
) -> None:
    assert refusal(write(tmp_path / "x.gguf", keys={key: value})).startswith(
        f"llama.{key} {problem}; allowed: "
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("ggml.pre", "martian", "is 'martian'; allowed: a pre-tokenizer that is known: a.x-4.0, "),
        ("ggml.pre", 7, "is 7; allowed: a pre-tokenizer"),
        ("ggml.model", "bert", "is 'bert'; allowed: 'gpt2' or 'llama'"),
        ("ggml.model", None, "is missing; allowed: 'gpt2' or 'llama'"),
        ("ggml.merges", None, "is missing; allowed: a list of merges"),
        ("ggml.token_type", [1, 1], "is a list of 2; allowed: a list of 260, one for each token"),
        ("ggml.eos_token_id", 260, "is 260; allowed: 0 to 259"),
        ("ggml.eos_token_id", "1", "is '1'; allowed: 0 to 259"),
        ("ggml.add_bos_token", 1, "is 1; allowed: true or false"),
        ("ggml.add_sep_token", True, "is True; allowed: False, since it is not read"),
        ("ggml.suppress_tokens", [5], "is a list of 1; allowed: (), since it is not read"),
        ("ggml.new_thing", 1, "is 1; allowed: a file without this key, since it is not read"),
    ],
)
def test_a_tokenizer_that_would_be_read_wrong_is_named(
    tmp_path: Path, key: str, value: Any, problem: str
) -> None:
    sentence = refusal(write(tmp_path / "x.gguf", keys={f".tokenizer.{key}": value}))
    assert sentence.startswith(f"tokenizer.{key} {problem}")


def test_a_sentencepiece_vocabulary_needs_scores_and_gemma_no_space(tmp_path: Path) -> None:
    keys = {
        ".tokenizer.ggml.model": "llama",
        ".tokenizer.ggml.pre": "martian",
        ".tokenizer.ggml.merges": None,
    }
    path = write(tmp_path / "x.gguf", keys=keys)
    assert refusal(path).startswith("tokenizer.ggml.scores is missing; allowed: a list of 260")
    keys |= {".tokenizer.ggml.scores": [0.0] * len(TOKENS), ".tokenizer.ggml.add_space_prefix": True}
    config_of(write(tmp_path / "y.gguf", keys=keys))
    path = write(tmp_path / "z.gguf", "gemma2", keys)
    assert refusal(path) == "tokenizer.ggml.add_space_prefix is True; allowed: false"


@pytest.mark.parametrize("architecture", ["clip", "deepseek2", "mistral", "t5", "falcon", "bert"])
def test_an_architecture_that_is_not_read_is_refused_with_those_that_are(
    tmp_path: Path, architecture: str
) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    finish(writer, path)
    assert refusal(path) == (
        "its architecture is not read; allowed: gemma2, gemma3, glm4moe, gpt-oss, gpt2, lfm2, llama, "
        "olmoe, phi3, qwen2, qwen2moe, qwen3, qwen35, qwen35moe, qwen3moe, starcoder2"
    )


def test_the_page_of_models_lists_what_is_read() -> None:
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text("utf-8")
    listed = re.findall(r"^- ((?:`\w+`(?:, )?)+)(?: \(model types? .*\))?: ", page, re.M)
    assert {name for names in listed for name in re.findall(r"\w+", names)} >= NAMES.keys()


def test_an_adapter_or_a_projector_is_no_model(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", keys={".general.type": "adapter"})
    with pytest.raises(ConfigError, match=r"has general\.type 'adapter'; allowed: 'model'"):
        check_convertible(path, read_header(path))


def test_factors_of_rotary_embeddings_are_read_where_the_family_has_them_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen2", rope_freqs__weight=[1.0] * 8)
    assert refusal(path) == "the tensor 'rope_freqs.weight' is not read for this architecture"
    path = write(tmp_path / "y.gguf", "llama", rope_freqs__weight=[1.0] * 7)
    assert refusal(path) == "the tensor 'rope_freqs.weight' has 7 numbers; allowed: 8 finite ones"
    path = write(tmp_path / "z.gguf", "phi3", rope_factors_long__weight=[1.0] * 8)
    assert refusal(path).startswith("it has one of the tensors 'rope_factors_short.weight' and ")


def test_values_that_change_nothing_are_no_reason(tmp_path: Path) -> None:
    keys = {
        "expert_count": 0,
        "expert_used_count": 0,
        "attention.sliding_window": 0,
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "logit_scale": 1.0,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 4.0,
        "rope.scaling.finetuned": True,
        "rope.scaling.original_context_length": 64,
        "attention.head_count": [HEADS] * LAYERS,
        ".tokenizer.ggml.eot_token_id": 1,
        ".tokenizer.ggml.fim_pre_token_id": 0,
        ".tokenizer.chat_template.tool_use": "x",
        ".quantize.imatrix.file": "x",
    }
    assert config_of(write(tmp_path / "x.gguf", keys=keys)) == config_of(write(tmp_path / "y.gguf"))


@pytest.mark.parametrize(
    ("name", "keys", "rope"),
    [
        ("llama", {"rope.freq_base": None}, {"rope_type": "default", "rope_theta": 10_000.0}),
        # A factor alone, also by its old name, is one of linear scaling, as llama.cpp takes it.
        ("qwen2", {"rope.scaling.factor": 2.0}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}),
        ("qwen2", {"rope.scale_linear": 2.0}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}),
        (
            "qwen2-yarn",
            {
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.attn_factor": 0.5,
                "rope.scaling.original_context_length": None,
            },
            {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": pytest.approx(0.5693147, abs=1e-6),
            },
        ),
    ],
)
def test_rotary_embeddings_are_those_of_the_header(
    tmp_path: Path, name: str, keys: dict[str, Any], rope: dict[str, Any]
) -> None:
    assert config_of(write(tmp_path / "x.gguf", name, keys))["rope_parameters"] == rope


def test_factors_of_no_known_formula_are_taken_as_they_are(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0]
    path = write(tmp_path / "x.gguf", "llama", {"rope.freq_base": 5e5}, rope_freqs__weight=factors)
    assert config_of(path)["rope_parameters"] == {
        "rope_type": "longrope",
        "rope_theta": 5e5,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 512,
    }


@pytest.mark.parametrize(
    ("name", "keys", "kinds"),
    [
        ("gemma2", {}, "slslsls"),
        ("gemma3", {}, "sssssls"),
        ("gemma3", {"attention.sliding_window_pattern": 3}, "sslssls"),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, False, True, True, True, True, False]},
            "slssssl",
        ),
        ("gemma3", {"attention.sliding_window": None}, "lllllll"),
    ],
)
def test_layers_with_a_window_are_those_of_the_header(
    tmp_path: Path, name: str, keys: dict[str, Any], kinds: str
) -> None:
    config = config_of(write(tmp_path / "x.gguf", name, keys))
    assert "".join(kind[0].replace("f", "l") for kind in config["layer_types"]) == kinds


def test_what_a_gemma2_header_leaves_out_is_what_llama_cpp_takes(tmp_path: Path) -> None:
    left_out = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    config = config_of(write(tmp_path / "x.gguf", "gemma2", dict.fromkeys(left_out)))
    assert (
        config["sliding_window"],
        config["attn_logit_softcapping"],
        config["final_logit_softcapping"],
    ) == (
        4096,
        50.0,
        30.0,
    )
    assert config["query_pre_attn_scalar"] == HEAD_DIM


def test_layers_that_predict_several_tokens_are_left_aside(tmp_path: Path) -> None:
    keys = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": None}
    path = write(tmp_path / "x.gguf", "qwen35", keys, blk__4__nextn__eh_proj__weight=[1.0])
    config, apart = read_config(path, read_header(path))
    assert (config["num_hidden_layers"], apart) == (4, {"blk.4.nextn.eh_proj.weight"})
    assert config["layer_types"] == [*["linear_attention"] * 3, "full_attention"]
