"""Identity of models by content: what makes another model, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.checkpoint_digest import adapter_digest, checkpoint_digest, file_digest
from specray.errors import ConfigError

HEAD = 16 * 2**20
"""Bytes that are read whole."""


def checkpoint(
    directory: Path, *, weights: bytes = b"weights", config: str = "{}", name: str = "model"
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    (directory / f"{name}.safetensors").write_bytes(weights)
    return directory


def test_a_model_is_its_content_wherever_it_lies(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", name="other")
    (second / "README.md").write_text("moved")
    assert checkpoint_digest("a", first) == checkpoint_digest("b", second)


def test_configuration_weights_adapter_and_settings_make_another_model(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"tensors")
    plain = checkpoint(tmp_path / "plain")
    digests = {
        checkpoint_digest("m", plain),
        checkpoint_digest("m", plain, settings=("bfloat16",)),
        checkpoint_digest("m", plain, settings=("bfloat", "16")),
        checkpoint_digest("m", plain, adapter=str(adapter)),
        checkpoint_digest("m", checkpoint(tmp_path / "configured", config='{"layers": 2}')),
        checkpoint_digest("m", checkpoint(tmp_path / "trained", weights=b"Weights")),
        checkpoint_digest("m", None),
        checkpoint_digest("n", None),
    }
    assert len(digests) == 8
    before = adapter_digest(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"tensorz")
    assert adapter_digest(adapter) != before


def test_a_light_checkpoint_is_its_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "file.gguf"
    file.write_bytes(b"GGUF 1")
    light = tmp_path / "light"
    light.mkdir()
    (light / "config.json").write_text("{}")
    (light / "model.gguf").symlink_to(file)
    before = checkpoint_digest("m", light)
    file.write_bytes(b"GGUF 2")
    assert checkpoint_digest("m", light) != before


def test_training_shows_in_samples_of_a_file_whose_header_stays(tmp_path: Path) -> None:
    """All bytes of a layer after the header are others; size and header are not."""
    file = tmp_path / "model.safetensors"
    content = bytearray(HEAD + 2**20)
    file.write_bytes(content)
    before = file_digest(file)
    content[-(2**17) :] = b"\1" * 2**17
    file.write_bytes(content)
    assert file_digest(file) != before
    file.write_bytes(content + b"\0")
    assert file_digest(file) != before


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read: No such file"):
        adapter_digest(tmp_path)
    with pytest.raises(ConfigError, match=r"model 'm' cannot be read: .*config.json: No such file"):
        checkpoint_digest("m", tmp_path)
