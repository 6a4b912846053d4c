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


@pytest.fixture(scope="session")
def llama(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")
