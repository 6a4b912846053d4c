"""Files of strangers' checkpoints: sizes, depth and counts are bounded, with a sentence each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specray.engine.model.description import ModelArgs, describe
from specray.errors import ConfigError
from specray.json_files import check_settings, read_json_file
from specray.tokenization import load_tokenizer


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [65, 200_000])
def test_a_file_nested_too_deep_is_a_value_error_and_no_recursion_error(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "a.json"
    file.write_text(nested(64))
    read_json_file(file)
    file.write_text(nested(depth))
    with pytest.raises(ValueError, match=r"a\.json is nested too deep; allowed: 64 levels"):
        read_json_file(file)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('"' + "x" * 98 + '"')
    assert len(read_json_file(file, 100)) == 98
    with pytest.raises(ValueError, match=r"a\.json has 100 bytes; allowed: at most 99"):
        read_json_file(file, 99)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_settings_that_libraries_read_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / name).write_text(nested(200_000))
    for load in (lambda: load_tokenizer(tmp_path), lambda: describe(ModelArgs(str(tmp_path)))):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read: {name} is nested too deep"):
            load()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"num_hidden_layers": 4097}, "num_hidden_layers is 4097; allowed: at most 4096"),
        ({"text_config": {"n_layers": 10**9}}, "n_layers is 1000000000; allowed: at most 4096"),
        ({"n_routed_experts": 10**9}, "n_routed_experts is 1000000000; allowed: at most 65536"),
        ({"num_attention_heads": 1e300}, "num_attention_heads is 1e\\+300; allowed: at most 65536"),
        ({"vocab_size": 2**28 + 1}, "vocab_size is 268435457; allowed: at most 268435456"),
        ({"head_dim": -(2**25)}, "head_dim is -33554432; allowed: at most 16777216"),
    ],
)
def test_counts_beyond_all_models_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem):
        check_settings(tmp_path)


def test_the_largest_counts_are_taken(tmp_path: Path) -> None:
    counts = {"num_hidden_layers": 4096, "num_experts": 65_536, "vocab_size": 2**28, "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(counts))
    check_settings(tmp_path)
