"""Checkpoints that tests quantise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.engine.model.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama-biased-scaled")


@pytest.fixture
def checkpoint(tmp_path: Path, llama: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))
