"""Checkpoints for accelerators are the shapes they are named after, and need room."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from specray.bench.gpu import models
from specray.demo.paths import demo_target_path
from specray.errors import ConfigError
from specray.train.inflate import InflatedShape

SMALL = InflatedShape(hidden_size=384, num_layers=6, intermediate_size=1024, num_heads=8, num_kv_heads=2)


def test_weights_of_a_shape_are_about_what_its_name_says() -> None:
    sizes = {name: models.num_weights(shape) for name, shape in models._SHAPES.items()}
    assert 1.1e9 < sizes["1b"] < 1.3e9
    assert 7.7e9 < sizes["8b"] < 8.1e9


def test_inflated_checkpoint_computes_the_embedded_targets_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models._SHAPES, "small", SMALL)
    path = models.make_checkpoint("small", tmp_path, "cpu")
    assert (path / "tokenizer.json").is_file()
    assert [child.name for child in tmp_path.iterdir()] == ["small"]
    token_ids = torch.tensor([[5, 60, 700, 9]])
    logits = []
    for checkpoint in (demo_target_path(), path):
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.inference_mode():
            logits.append(model(token_ids).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=0)
    # A second call finds it.
    before = (path / "config.json").stat().st_mtime_ns
    assert models.make_checkpoint("small", tmp_path, "cpu") == path
    assert (path / "config.json").stat().st_mtime_ns == before


def test_too_little_disk_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    def usage(path: Path) -> Usage:
        return Usage(10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(ConfigError, match=r"has 1\.0 GB free; needed: 16\.\d GB"):
        models.make_checkpoint("8b", tmp_path, "cpu")
    assert list(tmp_path.iterdir()) == []
