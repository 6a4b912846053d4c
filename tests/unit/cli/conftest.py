"""A service that is recorded in place of being served."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.config import Config


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """The configurations that ``specray serve`` would have served, each ending with exit code 7."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    configs: list[Config] = []

    def run_service(config: Config) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr("specray.serving.launch.run_service", run_service)
    return configs
