"""A target that the tests of one module train for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.train.heads.runs import write_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("pair"))
