"""Fields of a configuration that are senseless, or that transformers' forward and cache read in two ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specray.engine.model.decoder_config import Llama3Scaling, RopeFormula
from specray.engine.model.description import ModelArgs, ModelDescription, describe
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import change_config, write_family
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_runner

MAX_MODEL_LEN = 128


def described(directory: Path, family: str, changed: dict[str, Any]) -> ModelDescription:
    """What is said of a family whose config.json was changed by hand."""
    write_family(directory, FAMILIES[family])
    change_config(directory, **changed)
    return describe(ModelArgs(str(directory), max_model_len=MAX_MODEL_LEN))


@pytest.mark.parametrize(
    ("family", "changed", "sentence"),
    [
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads is 4; allowed: a multiple of num_key_value_heads, which is 3",
        ),
        # A window that the model's code does not know, while transformers' cache does.
        (
            "llama",
            {"sliding_window": 16},
            "model type 'llama' is not supported: its configuration names a window of 16 tokens for layer 0, "
            "which attends to all; allowed: max_model_len up to 16",
        ),
        (
            "granite",
            {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
            "a window of 16 tokens for layer 1, which attends to all; allowed: max_model_len up to 16",
        ),
        # Of a window of one, transformers' cache keeps the first tokens as well.
        (
            "mistral-windowed",
            {"sliding_window": 1},
            "layer 0 has a window of 1 tokens, of which transformers' cache keeps others; allowed: 2 or more",
        ),
        ("phi3", {"sliding_window": -1}, "layer 0 has a window of -1 tokens"),
        ("starcoder2", {"sliding_window": 1}, "with transformers' own cache its logits are off by"),
        # Layers with fields of their own, of which the model's code does not know.
        (
            "llama",
            {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
            "it cannot be checked at a small size (per_layer_config gives its layers rms_norm_eps of their "
            "own, which transformers' model of it does not read)",
        ),
        (
            "llama",
            {"per_layer_config": {"1": {"max_position_embeddings": 64}}},
            ": per_layer_config gives its layers max_position_embeddings of their own, which",
        ),
        (
            "qwen3",
            {"per_layer_config": {"1": {"vocab_size": 64}}},
            "cannot be loaded: per_layer_config gives its layers vocab_size of their own",
        ),
        (
            "llama",
            {"per_layer_config": [{"intermediate_size": 64}]},
            """per_layer_config is "[{'intermediate_size': 64}]"; allowed: an object of objects""",
        ),
        (
            "llama",
            {"per_layer_config": {"full_attention": {}}},
            "per_layer_config is \"{'full_attention': {}}\"",
        ),
        # Kinds of rotary embeddings that there are not.
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_type": "spiral", "rope_theta": 1e4}}},
            "rope_parameters.full_attention.rope_type is 'spiral'; allowed: default, dynamic, linear, ",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "spiral"}},
            "rope_scaling.rope_type is 'spiral'; allowed: default, ",
        ),
        (
            "laguna",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "it cannot be checked at a small size (its configuration lacks 'full_attention')",
        ),
        ("olmo", {"sliding_window": 16}, "with transformers' own cache its logits are off by"),
        ("qwen2-sliding", {"use_sliding_window": False}, "transformers makes no cache for it"),
        ("llama", {"is_causal": False}, "its tokens see those after them (is_causal is false)"),
        (
            "llama4",
            {"floor_scale": 64},
            "it scales the queries of tokens from 64 on and max_model_len is 128; allowed: "
            "max_model_len up to 63",
        ),
    ],
)
def test_is_refused(tmp_path: Path, family: str, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described(tmp_path, family, changed)
    message = str(caught.value)
    assert sentence in message and "\n" not in message


def test_a_window_that_no_sequence_reaches_is_none(tmp_path: Path) -> None:
    decoder = described(tmp_path, "llama", {"sliding_window": MAX_MODEL_LEN}).decoder
    assert decoder is not None and decoder.windows == (None, None)


def test_the_original_context_beside_the_rotary_parameters_counts(tmp_path: Path) -> None:
    """As the library's models read it, whatever is within them."""
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500.0, **scaling, "original_max_position_embeddings": 128}
    changed = {"original_max_position_embeddings": 64, "rope_parameters": rope}
    decoder = described(tmp_path, "llama", changed).decoder
    assert decoder is not None
    assert decoder.rope == RopeFormula(500.0, Llama3Scaling(4.0, 1.0, 4.0, 64))


def test_an_odd_number_of_rotated_dimensions_is_left_to_the_library(tmp_path: Path) -> None:
    """Which rotates four of eight, not three."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4}
    assert described(tmp_path, "phi3", {"rope_parameters": rope}).decoder is None


def test_a_model_whose_own_forward_fails_is_refused(tmp_path: Path) -> None:
    """Its miniature has heads that fit each other."""
    write_family(tmp_path, replace(FAMILIES["olmo"], values={"num_key_value_heads": 3}))
    with pytest.raises(ConfigError, match="OlmoForCausalLM is not supported: its forward fails"):
        cpu_runner(tmp_path, max_model_len=MAX_MODEL_LEN)
