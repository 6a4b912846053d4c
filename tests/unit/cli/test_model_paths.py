"""``~`` and relative paths of models, in files and options."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.cli.settings import build_config
from specray.config import load_config, parse_config


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home/models/big").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_home_is_expanded(home: Path) -> None:
    config = build_config(None, {"target.model": "~/models/big", "draft.enabled": False})
    assert config.target.model == str(home / "models/big")
    assert config.model_name == "big"
    # Also where nothing is there, so that the error shows where it was looked for.
    assert parse_config({"target": {"model": "~/nothing"}}).target.model == str(home / "nothing")


@pytest.mark.parametrize("path", ["home/models/big", "./home/models/big", "home/../home/models/big"])
def test_relative_to_the_working_directory(home: Path, path: str) -> None:
    model = parse_config({"target": {"model": path}}).target.model
    assert Path(model).is_absolute() and Path(model).samefile(home / "models/big")


def test_relative_to_the_file(home: Path) -> None:
    file = home / "models/service.yaml"
    file.write_text("target: {model: ./big}\ndraft: {model: ngram}\n")
    (home / "models/ngram").mkdir()
    config = load_config(file)
    assert Path(config.target.model).samefile(home / "models/big")
    assert config.draft.model == "ngram"


def test_hub_ids_and_names_stay(home: Path) -> None:
    (home.parent / "embedded").mkdir()
    config = parse_config({"target": {"model": "owner/name"}, "draft": {"model": "embedded"}})
    assert (config.target.model, config.draft.model) == ("owner/name", "embedded")
