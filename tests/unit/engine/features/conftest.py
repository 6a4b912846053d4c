"""Files that the tests of drafters share: a target, and an EAGLE-3 drafter for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.model.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="session")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("eagle"), *official(eagle3_weights()))
