"""Checkpoints for accelerators are the shapes they are named after, and need room."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from specray.bench.gpu import models
from specray.errors import ConfigError
from specray.train.inflate import InflatedShape

SMALL = InflatedShape(hidden_size=384, num_layers=6, intermediate_size=1024, num_heads=8, num_kv_heads=2)


def test_weights_of_a_shape_are_about_what_its_name_says() -> None:
    sizes = {name: models.num_weights(shape) for name, shape in models.SHAPES.items()}
    assert 1.1e9 < sizes["1b"] < 1.3e9
    assert 7.7e9 < sizes["8b"] < 8.1e9


def test_a_checkpoint_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.SHAPES, "small", SMALL)
    path = models.make_checkpoint("small", tmp_path, "cpu")
    assert (path / "tokenizer.json").is_file()
    assert [child.name for child in tmp_path.iterdir()] == ["small"]
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
