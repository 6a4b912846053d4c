"""Hub ids are found in the hub's cache, and paths as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.model.checkpoint.location import find_description, find_weights, read_config
from specray.engine.model.description import ModelArgs, describe
from specray.engine.model.loader import DecoderSource, load_model
from specray.errors import ConfigError
from specray.tokenization.fingerprint import tokenizer_vocabulary

HUB_ID = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

Hub = Callable[[], Path]


@pytest.fixture
def snapshot(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one model, and no network."""
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    directory = repository / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    for file in llama.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return directory


def test_path_is_its_own_directory(llama: Path) -> None:
    assert find_description(str(llama)) == llama
    assert find_weights(str(llama), llama) == llama


def test_hub_id_is_its_snapshot(snapshot: Path) -> None:
    assert find_description(HUB_ID) == snapshot
    assert find_weights(HUB_ID, snapshot) == snapshot


def test_hub_id_with_several_files(snapshot: Path) -> None:
    (snapshot / "model.safetensors").rename(snapshot / "model-1.safetensors")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}))
    assert find_weights(HUB_ID, snapshot) == snapshot
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert find_weights(HUB_ID, snapshot) is None


def test_hub_id_whose_configuration_names_the_file(snapshot: Path) -> None:
    (snapshot / "model.safetensors").rename(snapshot / "other.safetensors")
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    source = load_model(ModelArgs(HUB_ID), dtype=torch.float32, device=torch.device("cpu")).source
    assert isinstance(source, DecoderSource)
    assert source.weights.take("model.norm.weight").shape == (32,)


def test_hub_id_whose_weights_cannot_be_had(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    assert find_description(HUB_ID) == snapshot
    assert find_weights(HUB_ID, snapshot) is None
    with pytest.raises(ConfigError, match="'someone/tiny' cannot be loaded: its safetensors files"):
        load_model(ModelArgs(HUB_ID), dtype=torch.float32, device=torch.device("cpu"))


def test_unknown_hub_id_is_left_to_the_library(snapshot: Path) -> None:
    assert find_description("someone/else") is None
    with pytest.raises(ConfigError, match="model 'someone/else' cannot be loaded"):
        describe(ModelArgs("someone/else"))


def test_hub_id_loads_as_a_directory_does(snapshot: Path, llama: Path) -> None:
    loaded: list[Any] = [
        load_model(ModelArgs(path), dtype=torch.float32, device=torch.device("cpu"))
        for path in (HUB_ID, str(llama))
    ]
    hub, local = loaded
    assert (hub.name, hub.vocab_size, hub.max_model_len) == ("tiny", 96, 128)
    assert hub.tokenizer_fingerprint == local.tokenizer_fingerprint
    assert isinstance(hub.source, DecoderSource) and hub.source.config == local.source.config
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(hub.source.weights.take(name), local.source.weights.take(name))
    assert tokenizer_vocabulary(HUB_ID, snapshot).fingerprint == local.tokenizer_fingerprint


@pytest.mark.parametrize("text", ["{", "[]", '{"configuration_files": ["config.4.0.0.json"]}'])
def test_configuration_that_only_the_library_reads(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) is None
