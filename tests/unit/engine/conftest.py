"""Checkpoints that tests of engines share; nobody changes their files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a family's checkpoint once."""
    from tests.unit.engine.model.checkpoints import write_checkpoint

    return functools.cache(lambda name: write_checkpoint(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's tests write one config.json over the other."""
    return tmp_path_factory.mktemp("config")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.engine.model.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
