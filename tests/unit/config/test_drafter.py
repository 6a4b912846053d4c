"""The target's drafter in the settings: it drafts for all where nothing else is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.cli.settings import build_config, pair_options
from specray.config import load_config, parse_config
from specray.errors import ConfigError
from specray.types import DraftKind


@pytest.mark.parametrize(
    "draft, kind, has_model",
    [
        (None, DraftKind.FEATURES, False),
        ({"num_replicas": 2}, DraftKind.FEATURES, False),
        ({"model": "ngram"}, DraftKind.NGRAM, False),
        ({"model": "/models/draft"}, DraftKind.MODEL, True),
        ({"model": "remote-features"}, DraftKind.MODEL, True),
        ({"enabled": False}, DraftKind.MODEL, False),
    ],
)
def test_who_drafts(draft: dict[str, Any] | None, kind: DraftKind, has_model: bool) -> None:
    values = {"target": {"drafter": "/models/head"}} | ({} if draft is None else {"draft": draft})
    config = parse_config(values)
    assert (config.draft.kind_in_use, config.draft.has_model) == (kind, has_model)
    assert parse_config(config.model_dump(mode="json")) == config
    assert "model" not in values.get("draft", {}) or draft is not None, "what was given stays as it is"


@pytest.mark.parametrize(
    ("name", "value"), [("drafter_vocabulary_ids", "/ids.json"), ("drafter_head_quantization", "int4")]
)
def test_a_head_for_drafting_is_of_mtp_alone(name: str, value: str) -> None:
    assert getattr(parse_config({"target": {"drafter": "mtp", name: value}}).target, name) == value
    with pytest.raises(ConfigError, match=rf"{name} is '{value}' with drafter None; allowed with: 'mtp'"):
        parse_config({"target": {name: value}})


def test_features_without_a_drafter_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft\.model is 'features' without target\.drafter"):
        parse_config({"draft": {"model": "features"}})


def test_paths_are_absolute_and_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert parse_config({"target": {"drafter": "~/head"}}).target.drafter == "/home/user/head"
    (tmp_path / "head").mkdir()
    (tmp_path / "service.yaml").write_text("target: {drafter: head}\n", "utf-8")
    assert load_config(tmp_path / "service.yaml").target.drafter == str(tmp_path / "head")


def test_the_option_stands_for_a_draft_of_ones_own_target() -> None:
    config = build_config(None, pair_options(target="/models/target", drafter="/models/head"))
    assert config.target.drafter == "/models/head" and config.draft.kind_in_use is DraftKind.FEATURES
    named = build_config(None, pair_options(target="/models/target", drafter="/models/head", draft="ngram"))
    assert named.draft.kind_in_use is DraftKind.NGRAM
    options = pair_options(target="/models/target", drafter="/models/head", draft="remote-features")
    remote = build_config(None, options)
    assert remote.draft.reads_features and remote.target.drafter == "/models/head"
